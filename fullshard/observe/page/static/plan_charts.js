// The charts of the Plan view: memory against capacity, the timeline of a step, and its seconds by cause.
import { COLOURS, colour, draw, narrow } from "./charts.js";
import { bytes, percent, seconds } from "./format.js";

const GIB = 2 ** 30;
// Each kind of bytes has its colour in every chart.
const TERMS = {
  activations: "#0072b2",
  gathered: "#e69f00",
  optimizer: "#009e73",
  params: "#cc79a7",
  gradients: "#56b4e9",
  "whole gradients": "#8c6bb1",
  reduce: "#b8a800",
  loss: "#d55e00",
  workspace: "#66c2a5",
  staging: "#a6761d",
  "reserved, not allocated": "#9a9a9a",
};
const SLIVER = 0.0005; // of a bar: terms below it are in the table only
const LANES = {
  compute: "compute",
  gather: "gather",
  reduce: "reduce",
  copies: "all-reduce",
  tensor: "tensor axis",
  experts: "experts",
  pcie_up: "PCIe up",
  pcie_down: "PCIe down",
  cpu: "CPU",
  disk: "disk",
};
// In the order of drawing: short copies must not cover the work between them.
const WORK = ["copies", "forward", "loss", "backward", "update", "all-gather", "reduce-scatter", "all-reduce", "offload"];

export function drawMemory(figure, found) {
  const bars = found.bars;
  const all = [...new Set(bars.flatMap((bar) => Object.keys(bar.terms)))];
  const terms = all.filter((term) => bars.some((bar) => (bar.terms[term] ?? 0) > SLIVER * bar.needed));
  const traces = terms.map((term, i) => ({
    type: "bar",
    orientation: "h",
    name: term,
    y: bars.map((_, bar) => bar),
    x: bars.map((bar) => (bar.terms[term] ?? 0) / GIB),
    marker: { color: TERMS[term] ?? COLOURS[(i + 7) % COLOURS.length] },
    hovertemplate: bars.map((bar) => `${term}: ${bytes(bar.terms[term] ?? 0)}<extra></extra>`),
  }));
  const rows = bars.flatMap((bar) => [
    ...Object.entries(bar.terms).map(([term, n]) => [bar.label, term, bytes(n), percent(n / bar.available)]),
    [bar.label, "needed", bytes(bar.needed), percent(bar.needed / bar.available)],
    [bar.label, "may be used", bytes(bar.available), "100.0%"],
  ]);
  draw(figure, {
    title: "Memory at the peak, and what may be used",
    note: found.fits ? `The device's peak is in the ${found.peak_phase}.` : "What the leanest plan would need of a device.",
    traces,
    layout: {
      barmode: "stack",
      bargap: 0.5,
      shapes: bars.map(limit),
      annotations: bars.flatMap((bar, i) => [above(bar, i), below(bar, i, bars)]),
      xaxis: { ticksuffix: " GiB", rangemode: "tozero", nticks: narrow() ? 4 : 10 },
      yaxis: { range: [bars.length - 0.45, -0.6], showticklabels: false, gridcolor: "rgba(0,0,0,0)", zeroline: false },
      margin: { l: 6, r: 12, t: 4, b: 24 },
      legend: { orientation: "h", y: -0.36 / bars.length, yanchor: "top", traceorder: "normal" },
    },
    height: 74 + 76 * bars.length + 20 * Math.ceil(terms.length / (narrow() ? 1.1 : 7)),
    head: ["Bar", "Term", "Bytes", "Of what may be used"],
    rows,
    numbers: [2, 3],
  });
}

// The dashed line at what may be used.
function limit(bar, i) {
  const line = { color: bar.needed > bar.available ? colour("bad") : colour("text"), width: 2, dash: "dash" };
  return { type: "line", x0: bar.available / GIB, x1: bar.available / GIB, y0: i - 0.3, y1: i + 0.3, line };
}

function above(bar, i) {
  const words = `${bar.label}: ${bytes(bar.needed)}`;
  const most = narrow() ? 48 : 130;
  const text = words.length > most ? `${bar.label.slice(0, most - 16)}…: ${bytes(bar.needed)}` : words;
  return { x: 0, y: i - 0.28, text, showarrow: false, xanchor: "left", yanchor: "bottom", font: { size: 12 } };
}

function below(bar, i, bars) {
  const longest = Math.max(...bars.map((one) => Math.max(one.needed, one.available)));
  return {
    x: bar.available / GIB,
    y: i + 0.28,
    text: `${bytes(bar.available)} may be used`,
    showarrow: false,
    xanchor: bar.available > 0.6 * longest ? "right" : "left",
    yanchor: "top",
    font: { size: 11, color: bar.needed > bar.available ? colour("bad") : colour("text") },
  };
}

function workColour(what, i) {
  const at = WORK.indexOf(what);
  return COLOURS[(at < 0 ? i : at + COLOURS.length - 1) % COLOURS.length];
}

export function drawTimeline(figure, found) {
  const lanes = Object.keys(LANES).filter((lane) => found.spans.some((span) => span[0] === lane));
  const kinds = WORK.filter((what) => found.spans.some((span) => span[1] === what));
  const others = [...new Set(found.spans.map((span) => span[1]))].filter((what) => !WORK.includes(what));
  const traces = [...kinds, ...others].map((what, i) => {
    const own = found.spans.filter((span) => span[1] === what);
    return {
      type: "bar",
      orientation: "h",
      name: what,
      y: own.map((span) => LANES[span[0]]),
      base: own.map((span) => 1000 * span[3]),
      x: own.map((span) => 1000 * (span[4] - span[3])),
      marker: { color: workColour(what, i), line: { width: 0 } },
      text: own.map((span) => `${span[1]}${span[2] ? ` of ${span[2]}` : ""}: ${seconds(span[4] - span[3])} from ${seconds(span[3])}`),
      textposition: "none",
      hovertemplate: "%{text}<extra></extra>",
    };
  });
  const left = found.left_out
    ? ` Of ${found.left_out + 3} micro-batches the first two and the last are drawn: the ${found.left_out} between are like the second.`
    : "";
  const busy = lanes.map((lane) => {
    const own = found.spans.filter((span) => span[0] === lane);
    const total = own.reduce((sum, span) => sum + span[4] - span[3], 0);
    return [LANES[lane], String(own.length), seconds(total), percent(total / found.spans_seconds)];
  });
  draw(figure, {
    title: "A step as a timeline of lanes",
    note: `Gaps of compute are waits.${left}`,
    traces,
    layout: {
      barmode: "overlay",
      bargap: 0.25,
      xaxis: { ticksuffix: " ms", range: [0, 1000 * found.spans_seconds], nticks: narrow() ? 4 : 10 },
      yaxis: { autorange: "reversed", type: "category", categoryorder: "array", categoryarray: lanes.map((lane) => LANES[lane]) },
      margin: { l: 10, r: 12, t: 6, b: 36 },
      legend: { orientation: "h", y: -0.75 / (lanes.length + 0.5), yanchor: "top", traceorder: "normal" },
    },
    height: 86 + 34 * lanes.length + (narrow() ? 60 : 0),
    head: ["Lane", "Spans", "Busy", "Of what is drawn"],
    rows: busy,
    numbers: [1, 2, 3],
  });
}

export function drawTime(figure, found) {
  const bar = (kind, name, tone) => {
    const own = found.time.filter((part) => part[2] === kind);
    return {
      type: "bar",
      orientation: "h",
      name,
      y: own.map((part) => broken(part[0])),
      x: own.map((part) => 1000 * part[1]),
      marker: { color: tone },
      hovertemplate: "%{y}: %{x:.2f} ms<extra></extra>",
    };
  };
  draw(figure, {
    title: "Where a step's time goes",
    traces: [bar("compute", "the device works", COLOURS[0]), bar("wait", "the device waits", COLOURS[5])],
    layout: {
      barmode: "stack",
      xaxis: { ticksuffix: " ms", rangemode: "tozero", nticks: narrow() ? 4 : 10 },
      yaxis: { autorange: "reversed", categoryorder: "array", categoryarray: found.time.map((part) => broken(part[0])) },
      margin: { l: 10, r: 12, t: 6, b: 24 },
      legend: { orientation: "h", y: -1.3 / (found.time.length + 1), yanchor: "top", traceorder: "normal" },
    },
    height: 80 + (narrow() ? 52 : 22) * found.time.length,
    head: ["What", "Seconds", "Of a step"],
    rows: found.time.map((part) => [part[0], seconds(part[1]), percent(part[1] / found.step_seconds)]),
    numbers: [1, 2],
  });
}

// In a narrow window, a label in lines of a few words.
function broken(text) {
  return narrow() ? text.replace(/(.{12,}?) /g, "$1<br>") : text;
}
