// Draws charts in the page's colours, each with its numbers as a table below.
import { make, table } from "./dom.js";

// Okabe and Ito's colours, which most people can tell apart; the last ones repeat them lighter.
export const COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8a800", "#7f7f7f", "#8c6bb1", "#66c2a5"];

const drawn = new Map(); // of each figure, how to draw it again

// Fill a figure: a title, a chart, and the same numbers as a table. `height` in pixels.
export function draw(figure, { title, note, traces, layout = {}, height = 260, head, rows, numbers = [] }) {
  let chart = figure.querySelector(".chart");
  if (!chart) {
    chart = make("div", { class: "chart", role: "img" });
    const details = make("details", {}, make("summary", {}, "Numbers"), make("div", { class: "numbers" }));
    new ResizeObserver(() => chart.data && chart.clientWidth && window.Plotly.Plots.resize(chart)).observe(chart);
    figure.replaceChildren(make("figcaption"), make("p", { class: "note" }), chart, details);
  }
  figure.querySelector("figcaption").textContent = title;
  const told = figure.querySelector(".note");
  told.textContent = note ?? "";
  told.hidden = !note;
  chart.setAttribute("aria-label", `${title}. The numbers are in the table below.`);
  const numbersNode = figure.querySelector(".numbers");
  if (!sameTable(numbersNode, rows)) numbersNode.replaceChildren(table(head, rows, numbers));
  const again = () => window.Plotly.react(chart, traces, themed(layout, height), { displayModeBar: false, responsive: true });
  drawn.set(figure, again);
  return again();
}

export function clear(figure) {
  drawn.delete(figure);
  const chart = figure.querySelector(".chart");
  if (chart) window.Plotly.purge(chart);
  figure.replaceChildren();
}

export function redrawAll() {
  for (const again of drawn.values()) again();
}

// Charts in a narrow window have shorter labels, and more room for their legends.
export function narrow() {
  return window.innerWidth < 600;
}

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function sameTable(node, rows) {
  const text = JSON.stringify(rows.map((row) => row.map(String)));
  if (node.dataset.rows === text) return true;
  node.dataset.rows = text;
  return false;
}

function themed(layout, height) {
  const axis = { gridcolor: colour("line"), zerolinecolor: colour("line"), automargin: true, fixedrange: true };
  return {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: colour("text"), family: "system-ui, sans-serif", size: 12 },
    margin: { l: 10, r: 10, t: 10, b: 30 },
    legend: { orientation: "h", y: -0.2, yanchor: "top" },
    hoverlabel: { bgcolor: colour("panel"), bordercolor: colour("line"), font: { color: colour("text") } },
    ...layout,
    height,
    xaxis: { ...axis, ...layout.xaxis },
    yaxis: { ...axis, ...layout.yaxis },
  };
}
