// The charts of the Run view, with all runs in one picture.
import { COLOURS, clear, draw } from "./charts.js";
import { bytes, count, number, percent, seconds } from "./format.js";

const GIB = 2 ** 30;
const SHOWN = 12; // rows of a table: the newest steps

function lines(runs, column, scale = 1) {
  return runs
    .filter((run) => run.series[column])
    .map((run) => ({
      type: "scatter",
      mode: run.series.step.length > 1 ? "lines" : "markers",
      name: run.name,
      x: run.series.step,
      y: run.series[column].map((value) => (value === null ? null : value * scale)),
      line: { color: run.colour, width: 1.6 },
      hovertemplate: `${run.name}, step %{x}: %{y:.5g}<extra></extra>`,
    }));
}

// The newest steps of each run as rows.
function newest(runs, columns, texts) {
  return runs.flatMap((run) => {
    const from = Math.max(0, run.series.step.length - SHOWN);
    return run.series.step
      .slice(from)
      .map((step, i) => [run.name, String(step), ...columns.map((column, c) => texts[c](run.series[column]?.[from + i]))])
      .reverse();
  });
}

const layout = (more = {}) => ({
  xaxis: { title: { text: "step", standoff: 4 } },
  yaxis: more,
  margin: { l: 10, r: 12, t: 6, b: 36 },
  showlegend: true,
  legend: { orientation: "h", y: 1, x: 0, yanchor: "bottom" },
});

export function drawLoss(figure, runs) {
  const held = runs
    .filter((run) => run.evaluations.length)
    .map((run) => ({
      type: "scatter",
      mode: "markers",
      name: `${run.name}, held-out`,
      x: run.evaluations.map((row) => row.step),
      y: run.evaluations.map((row) => row.loss),
      marker: { color: run.colour, symbol: "diamond", size: 8 },
      hovertemplate: "held-out, step %{x}: %{y:.5g}<extra></extra>",
    }));
  const thin = runs.some((run) => run.recorded > run.series.step.length);
  draw(figure, {
    title: "Loss",
    note: thin ? "Of many steps, those with the lowest and the highest loss are drawn." : "",
    traces: [...lines(runs, "loss"), ...held],
    layout: layout(),
    head: ["Run", "Step", "Loss", "Gradient norm", "Learning rate"],
    rows: newest(runs, ["loss", "grad_norm", "lr"], [number, number, number]),
    numbers: [1, 2, 3, 4],
  });
}

export function drawRate(figure, runs) {
  const column = runs.some((run) => run.series.tokens_per_second) ? "tokens_per_second" : "samples_per_second";
  const unit = column === "tokens_per_second" ? "tokens/s" : "samples/s";
  draw(figure, {
    title: unit,
    traces: lines(runs, column),
    layout: layout({ rangemode: "tozero" }),
    head: ["Run", "Step", unit, "Step time", "Of it, waiting for data", "MFU"],
    rows: newest(runs, [column, "seconds", "data_wait_seconds", "mfu"], [count, seconds, seconds, percent]),
    numbers: [1, 2, 3, 4, 5],
  });
}

export function drawMemoryUse(figure, runs) {
  const highest = Math.max(0, ...runs.flatMap((run) => [...(run.series.memory_allocated ?? []), ...(run.series.memory_reserved ?? [])]));
  const [size, unit] = highest < GIB ? [2 ** 20, "MiB"] : [GIB, "GiB"];
  const reserved = lines(runs, "memory_reserved", 1 / size).map((trace) => ({
    ...trace,
    name: `${trace.name}, reserved`,
    line: { ...trace.line, dash: "dot" },
  }));
  draw(figure, {
    title: "Memory of the first rank's device",
    traces: [...lines(runs, "memory_allocated", 1 / size), ...reserved],
    layout: layout({ rangemode: "tozero", ticksuffix: ` ${unit}` }),
    head: ["Run", "Step", "Allocated", "Reserved"],
    rows: newest(runs, ["memory_allocated", "memory_reserved"], [bytes, bytes]),
    numbers: [1, 2, 3],
  });
}

// What the planner said against what the run measured, as shares of the measured.
export function drawPredicted(figure, runs) {
  const rows = runs
    .filter((run) => run.predicted)
    .flatMap((run) => compared(run).map(([what, said, found, text]) => ({ run, what, said, found, text })));
  if (!rows.length) return clear(figure);
  const label = (row) => (runs.length > 1 ? `${row.run.name}: ${row.what}` : row.what);
  const bar = (name, values, tone) => ({
    type: "bar",
    name,
    x: rows.map(label),
    y: values,
    marker: { color: tone },
    hovertemplate: "%{x}: %{y:.1%} of the measured<extra></extra>",
  });
  return draw(figure, {
    title: "Predicted against measured",
    note: "As a share of what was measured, over the first steps.",
    traces: [
      bar("predicted", rows.map((row) => row.said / row.found), COLOURS[4]),
      bar("measured", rows.map(() => 1), COLOURS[0]),
    ],
    layout: {
      ...layout(),
      barmode: "group",
      bargap: 0.5,
      xaxis: { title: { text: "" } },
      yaxis: { tickformat: ".0%", rangemode: "tozero" },
    },
    head: ["Run", "What", "Predicted", "Measured", "Predicted of measured"],
    rows: rows.map((row) => [row.run.name, row.what, row.text(row.said), row.text(row.found), percent(row.said / row.found)]),
    numbers: [2, 3, 4],
  });
}

function compared(run) {
  const told = run.predicted;
  return [
    ["step time", told.predicted_seconds, told.measured_seconds, seconds],
    ["peak memory", told.predicted_allocated, told.measured_allocated, bytes],
  ].filter(([, said, found]) => said && found);
}
