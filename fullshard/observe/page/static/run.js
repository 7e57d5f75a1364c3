// The Run view: asks for every run again and again, and shows them together.
import { ask } from "./api.js";
import { COLOURS } from "./charts.js";
import { make, table } from "./dom.js";
import { bytes, count, number } from "./format.js";
import { drawLoss, drawMemoryUse, drawPredicted, drawRate } from "./run_charts.js";
import { runPanel } from "./run_panel.js";

const EVERY = 2000; // milliseconds between two looks
const hidden = new Set(); // runs that are not drawn
const panels = new Map();
let seen = [];
let looking = false;
let drawnText = ""; // what the charts show, to draw only what has changed

export function startRun(names) {
  document.getElementById("no-runs").hidden = names.length > 0;
  if (!names.length) return;
  look(names);
  document.addEventListener("viewchange", () => isShown() && look(names));
  setInterval(() => isShown() && look(names), EVERY);
}

function isShown() {
  return !document.hidden && !document.getElementById("run").hidden;
}

async function look(names) {
  if (looking) return; // the server is slow: one question at a time
  looking = true;
  const found = await Promise.allSettled(names.map((_, i) => ask(`/api/run/${i}`)));
  seen = found.map((one, i) => (one.status === "fulfilled" ? one.value : { ...seen[i], name: names[i], trouble: one.reason.message }));
  looking = false;
  show();
}

function show() {
  showSummary();
  const drawn = seen
    .map((run, i) => ({ ...run, colour: COLOURS[i % COLOURS.length], number: i }))
    .filter((run) => run.series && !hidden.has(run.number));
  seen.forEach(showPanel);
  const text = JSON.stringify(drawn.map((run) => [run.number, run.recorded, run.done, run.series.loss?.at(-1), run.evaluations, run.predicted]));
  if (text === drawnText) return;
  drawnText = text;
  drawLoss(document.getElementById("loss"), drawn);
  drawRate(document.getElementById("rate"), drawn);
  drawMemoryUse(document.getElementById("use"), drawn);
  drawPredicted(document.getElementById("predicted"), drawn);
}

function showSummary() {
  const node = document.getElementById("runs-summary");
  const focused = document.activeElement?.dataset?.run; // what is replaced must not lose the keyboard
  const rows = seen.map((run, i) => [tick(i), make("strong", {}, run.name), ...state(run)]);
  const head = ["Shown", "Run", "State", "Step", "Loss", "Rate", "Memory"];
  node.replaceChildren(table(head, rows, [3, 4, 5, 6]));
  if (focused !== undefined) node.querySelector(`[data-run="${focused}"]`)?.focus();
}

function tick(i) {
  const toggle = () => {
    hidden.has(i) ? hidden.delete(i) : hidden.add(i);
    show();
  };
  const box = make("input", { type: "checkbox", "data-run": i, "aria-label": "Draw this run", onchange: toggle });
  box.checked = !hidden.has(i);
  const swatch = make("span", { class: "swatch" });
  swatch.style.background = COLOURS[i % COLOURS.length];
  return make("span", {}, box, " ", swatch);
}

function state(run) {
  if (run.trouble || !run.series) return [make("span", { class: "bad" }, run.trouble ?? "…"), "–", "–", "–", "–"];
  const last = (name) => run.series[name]?.at(-1) ?? null;
  const rate = last("tokens_per_second") ?? last("samples_per_second");
  const unit = last("tokens_per_second") === null ? "samples/s" : "tokens/s";
  const kind = { running: "good", complete: "good" }[run.state] ?? "warn";
  return [
    make("span", { class: kind }, run.state),
    `${run.done}${run.about.steps ? ` of ${run.about.steps}` : ""}`,
    number(last("loss")),
    rate === null ? "–" : `${count(rate)} ${unit}`,
    bytes(last("memory_allocated")),
  ];
}

function showPanel(run, i) {
  if (!run.series) return;
  if (!panels.has(i)) {
    panels.set(i, runPanel(i, run));
    document.getElementById("run-details").append(panels.get(i).node);
  }
  panels.get(i).show(run);
}
