// What is shown of one run alone: its ranks, its checkpoints, its last profile and its events.
import { ask } from "./api.js";
import { COLOURS, clear, draw, narrow } from "./charts.js";
import { make, table } from "./dom.js";
import { bytes, clock, number, percent, seconds } from "./format.js";

const KINDS = { alive: "good", ended: "", whole: "good", verified: "good", partial: "warn", damaged: "bad" };

export function runPanel(index, run) {
  const parts = Object.fromEntries(["ranks", "checkpoints", "events"].map((name) => [name, make("div", { class: name })]));
  const profile = make("figure", { class: "profile" });
  const node = make("section", { class: "run-panel" }, make("h2", {}, run.name), parts.ranks, parts.checkpoints, profile, parts.events);
  const kept = new Map();
  // Replace a part only if what it shows has changed: a button that has the keyboard stays.
  const renew = (name, data, build) => {
    const text = JSON.stringify(data);
    if (kept.get(name) === text) return;
    kept.set(name, text);
    parts[name].replaceChildren(...build(data));
  };
  const show = (now) => {
    renew("ranks", now.ranks, ranks);
    renew("checkpoints", { rows: now.checkpoints, url: now.about.checkpoint_url }, (data) => checkpoints(index, data));
    renew("events", now.events, events);
    if (kept.get("profile") !== JSON.stringify(now.profile)) drawProfile(profile, now.profile);
    kept.set("profile", JSON.stringify(now.profile));
  };
  return { node, show };
}

function word(text) {
  return make("span", { class: KINDS[text] ?? "warn" }, text);
}

function ranks(found) {
  if (!found.length) return [make("p", { class: "note" }, "The ranks of this run tell nothing about themselves.")];
  const rows = found.map((rank) => [
    String(rank.rank),
    word(rank.health),
    rank.doing,
    String(rank.step),
    seconds(rank.step_seconds),
    bytes(rank.rss),
    `${rank.host}, process ${rank.pid}`,
  ]);
  return [make("h3", {}, "Ranks"), table(["Rank", "Health", "Doing", "Step", "Step time", "Host memory", "Where"], rows, [0, 3, 4, 5])];
}

function checkpoints(index, { rows, url }) {
  const none = url ? `This run saves to ${url}; fullshard checkpoint ls ${url} lists it.` : "There is none yet.";
  if (!rows.length) return [make("h3", {}, "Checkpoints"), make("p", { class: "note" }, none)];
  const body = rows.map((row) => [
    row.name,
    word(row.verdict),
    row.why,
    clock(row.created),
    bytes(row.bytes),
    Object.entries(row.metrics)
      .map(([name, value]) => `${name} ${number(value)}`)
      .join(", "),
    row.verdict === "whole" ? verifyButton(index, row.name) : "",
  ]);
  return [make("h3", {}, "Checkpoints"), table(["Checkpoint", "Verdict", "", "Written", "Size", "Metrics", ""], body, [4])];
}

function verifyButton(index, name) {
  const verify = async (event) => {
    const button = event.target;
    button.disabled = true;
    button.textContent = "Reading …";
    try {
      const row = await ask(`/api/run/${index}/verify?checkpoint=${encodeURIComponent(name)}`);
      button.replaceWith(word(row.verdict), `: ${row.why}`);
    } catch (error) {
      button.replaceWith(error.message);
    }
  };
  return make("button", { type: "button", onclick: verify, "aria-label": `Verify ${name}` }, "Verify");
}

function events(found) {
  if (!found.length) return [];
  const rest = ({ event, step, ...more }) =>
    Object.entries(more)
      .map(([name, value]) => `${name} ${typeof value === "number" ? number(value) : value}`)
      .join(", ");
  const rows = [...found].reverse().map((event) => [String(event.step), event.event, rest(event)]);
  return [make("details", {}, make("summary", {}, `Events (${found.length})`), table(["Step", "Event", ""], rows, [0]))];
}

// The lanes of each rank, as `fullshard profile` broke the step down, with those that the planner predicted.
function drawProfile(figure, found) {
  const measured = found?.breakdown?.ranks?.filter((rank) => rank.lanes);
  if (!measured?.length) return clear(figure);
  const { predicted, overlap, slowest, recommendation } = found.breakdown;
  const rows = measured.map((rank) => ({ ...rank, label: `rank ${rank.rank}` }));
  if (predicted?.lanes) rows.push({ ...predicted, label: "predicted" });
  const lanes = Object.keys(measured[0].lanes);
  const notes = [
    Number.isFinite(overlap) ? `${percent(overlap)} of communication is overlapped.` : "",
    slowest?.slow ? `Rank ${slowest.rank} is the slowest, in ${slowest.lane}.` : "",
    recommendation?.change ? `${recommendation.change} would save ${percent(recommendation.saves_share)} of a step: ${recommendation.why}.` : "",
  ];
  return draw(figure, {
    title: `Profile of step ${found.step}`,
    note: notes.filter(Boolean).join(" "),
    traces: lanes.map((lane, i) => ({
      type: "bar",
      orientation: "h",
      name: lane,
      y: rows.map((row) => row.label),
      x: rows.map((row) => 1000 * (row.lanes[lane] ?? 0)),
      marker: { color: COLOURS[i % COLOURS.length] },
      hovertemplate: `${lane}: %{x:.2f} ms<extra></extra>`,
    })),
    layout: {
      barmode: "stack",
      xaxis: { ticksuffix: " ms" },
      yaxis: { autorange: "reversed" },
      legend: { orientation: "h", y: 1, x: 0, yanchor: "bottom", traceorder: "normal" },
    },
    height: (narrow() ? 220 : 110) + 28 * Math.min(rows.length, 32),
    head: ["Rank", ...lanes, "A step"],
    rows: rows.map((row) => [row.label, ...lanes.map((lane) => seconds(row.lanes[lane])), seconds(row.step_seconds)]),
    numbers: [...lanes.map((_, i) => i + 1), lanes.length + 1],
  });
}
