// The Plan view: the controls, the question that they make, and the answer.
import { Superseded, ask } from "./api.js";
import { make, options, table } from "./dom.js";
import { bytes, count, percent, seconds } from "./format.js";
import { drawMemory, drawTime, drawTimeline } from "./plan_charts.js";

const PAUSE = 150; // milliseconds without a change before the server is asked
const LONG = 3000; // milliseconds after which the page says why it takes so long
const TAB = crypto.randomUUID(); // by which the server knows that a question replaces an earlier one
const form = document.getElementById("question");
const answer = document.getElementById("answer");
const verdict = document.getElementById("verdict");
let waiting = null;
let timer = 0;
let slow = 0;
let shown = null; // the answer on the page

export function startPlan(choices) {
  document.getElementById("models").replaceChildren(...choices.models.map((value) => make("option", { value })));
  const clusters = choices.devices.flatMap((device) => (device === "cpu" ? [`1x${device}`] : [1, 8, 64].map((n) => `${n}x${device}`)));
  document.getElementById("clusters").replaceChildren(...clusters.map((value) => make("option", { value })));
  for (const choice of choices.controls) document.getElementById(choice.label ? "how" : "further").append(control(choice));
  options(form.elements.micro_batch, ["auto", 1, 2, 4, 8, 16, 32]);
  form.elements.model.value = choices.first.model;
  form.elements.cluster.value = choices.first.cluster;
  restore();
  offerMesh();
  restore();
  const further = document.getElementById("further");
  further.open = [...further.querySelectorAll("select, input")].some(({ value }) => value && value !== "auto");
  form.addEventListener("input", changed);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", (event) => {
    event.preventDefault();
    for (const select of form.querySelectorAll("select")) select.value = "auto";
    for (const number of form.querySelectorAll("#further input")) number.value = "";
    changed();
  });
  document.getElementById("download").addEventListener("click", download);
  document.getElementById("copy").addEventListener("click", copy);
  askNow();
}

// A choice that the search can keep: a list of its values, or a field for a number. Sizes of a mesh are offered later.
function control({ name, label, help, values }) {
  const listed = values.length || label;
  const input = listed ? make("select", { name }) : make("input", { name, inputmode: "decimal", placeholder: "auto" });
  if (listed) options(input, ["auto", ...values]);
  return make("label", { title: help }, `${label || name.replaceAll("_", " ")} `, input);
}

function question() {
  const given = [...new FormData(form)].filter(([, value]) => value.trim() && value !== "auto");
  return new URLSearchParams(given);
}

// The address keeps the question, so that a reload or a bookmark asks it again.
function restore() {
  const kept = new URLSearchParams(location.hash.startsWith("#plan?") ? location.hash.slice(6) : "");
  for (const [name, value] of kept) if (form.elements[name]) form.elements[name].value = value;
}

function remember(asked) {
  window.lastQuestion = `#plan?${asked}`;
  if (!document.getElementById("plan").hidden) history.replaceState(null, "", window.lastQuestion);
}

// Axes of a mesh divide the number of devices.
function offerMesh() {
  const devices = Number.parseInt(form.elements.cluster.value, 10) || 1;
  const divisors = [1, 2, 4, 8, 16, 32, 64, 128].filter((n) => n <= devices && devices % n === 0);
  options(form.elements.replicate, ["auto", ...divisors.slice(1)]);
  options(form.elements.tensor, ["auto", ...divisors.filter((n) => n <= 8)]);
}

function changed(event) {
  if (event?.target?.name === "cluster") offerMesh();
  clearTimeout(timer);
  timer = setTimeout(askNow, PAUSE);
}

async function askNow() {
  const asked = question();
  remember(asked);
  waiting?.abort();
  waiting = new AbortController();
  answer.setAttribute("aria-busy", "true");
  clearTimeout(slow);
  slow = setTimeout(() => say("Still searching. A model that is no preset, and a tensor axis, are traced first.", ""), LONG);
  try {
    show(await ask(`/api/plan?${asked}&tab=${TAB}`, { signal: waiting.signal }));
  } catch (error) {
    if (error instanceof Superseded) return;
    clearTimeout(slow);
    say(error.message, "bad");
    showNothing();
  }
  clearTimeout(slow);
  answer.setAttribute("aria-busy", "false");
}

function say(sentence, kind) {
  verdict.textContent = sentence;
  verdict.className = `verdict ${kind}`;
}

function showNothing() {
  shown = null;
  document.getElementById("headline").replaceChildren();
  document.getElementById("actions").hidden = true;
  for (const id of ["memory", "timeline", "time", "others", "choices"]) hide(id);
}

function hide(id) {
  document.getElementById(id).hidden = true;
}

function unhide(id) {
  const node = document.getElementById(id);
  node.hidden = false;
  return node;
}

function show(found) {
  shown = found;
  say(found.sentence, found.fits ? "good" : "bad");
  document.getElementById("actions").hidden = false;
  document.getElementById("download").hidden = !found.fits;
  document.getElementById("command").textContent = found.command;
  drawMemory(unhide("memory"), found);
  if (!found.fits) {
    document.getElementById("headline").replaceChildren();
    for (const id of ["timeline", "time", "others", "choices"]) hide(id);
    return;
  }
  showHeadline(found);
  drawTimeline(unhide("timeline"), found);
  drawTime(unhide("time"), found);
  showOthers(unhide("others"), found);
  showChoices(unhide("choices"), found);
}

function showHeadline(found) {
  const card = (name, value, kind = "") => make("div", { class: kind }, make("dt", {}, name), make("dd", {}, value));
  const cards = [
    card(`${found.counted}/s`, count(found.rate)),
    card("A step", seconds(found.step_seconds)),
    card("MFU", percent(found.mfu)),
    found.price === null ? null : card(`A million ${found.counted}`, found.price.toFixed(2)),
    card("Bottleneck", found.bottleneck, "wide"),
  ];
  document.getElementById("headline").replaceChildren(...cards.filter(Boolean));
}

function showOthers(node, found) {
  const rows = found.alternatives.map((other) => [
    other.label,
    other.reason,
    other.step_seconds === null ? "does not fit" : seconds(other.step_seconds),
    bytes(other.needed),
    useButton(other),
  ]);
  const head = ["Plan", "Why it lost", "A step", "Needs at least", ""];
  const words = `${found.considered} plans considered in ${seconds(found.search_seconds)}.`;
  const body = rows.length ? table(head, rows, [2, 3]) : make("p", {}, "Your choices leave no other strategy.");
  node.replaceChildren(make("h2", {}, "Why the others lost"), make("p", { class: "note" }, words), body);
}

function useButton(other) {
  const strategy = other.label.split(",")[0].split(" ")[0];
  const use = () => {
    form.elements.strategy.value = strategy;
    changed();
    form.elements.strategy.focus();
  };
  return make("button", { type: "button", onclick: use, "aria-label": `Choose ${strategy}` }, `Choose ${strategy}`);
}

function showChoices(node, found) {
  const rows = Object.entries(found.choices);
  const notes = [`Plan ${found.digest.slice(0, 12)}, calibration: ${found.calibration}.`, ...found.notes.map((note) => `Note: ${note}.`)];
  node.replaceChildren(
    make("h2", {}, "The plan"),
    table(["Choice", "Value"], rows),
    ...notes.map((note) => make("p", { class: "note" }, note)),
  );
}

function download() {
  const link = make("a", {
    href: URL.createObjectURL(new Blob([shown.plan], { type: "application/json" })),
    download: `plan-${shown.digest.slice(0, 12)}.json`,
  });
  link.click();
  URL.revokeObjectURL(link.href);
}

async function copy() {
  const told = document.getElementById("copied");
  try {
    await navigator.clipboard.writeText(shown.command);
    told.textContent = "Copied.";
  } catch {
    getSelection().selectAllChildren(document.getElementById("command"));
    told.textContent = "Selected: press Ctrl-C.";
  }
  setTimeout(() => (told.textContent = ""), 3000);
}
