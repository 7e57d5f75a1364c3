// The frame of the page: views, theme, and what both views share.
import { ask } from "./api.js";
import { redrawAll } from "./charts.js";
import { startPlan } from "./plan.js";
import { startRun } from "./run.js";

const VIEWS = ["plan", "run"];
const tab = (view) => document.getElementById(`tab-${view}`);

function show(view) {
  for (const name of VIEWS) {
    document.getElementById(name).hidden = name !== view;
    tab(name).setAttribute("aria-selected", String(name === view));
    tab(name).tabIndex = name === view ? 0 : -1;
  }
  redrawAll(); // a chart that was hidden has no width
  document.dispatchEvent(new Event("viewchange"));
}

function startTabs() {
  for (const view of VIEWS) {
    tab(view).addEventListener("click", () => {
      history.replaceState(null, "", view === "plan" ? (window.lastQuestion ?? "#plan") : "#run");
      show(view);
    });
    tab(view).addEventListener("keydown", (event) => {
      if (event.key !== "ArrowRight" && event.key !== "ArrowLeft") return;
      const other = VIEWS[1 - VIEWS.indexOf(view)];
      tab(other).focus();
      tab(other).click();
    });
  }
}

function startTheme() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const tell = () => {
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", `Show the page in ${isDark() ? "light" : "dark"} colours`);
    redrawAll();
  };
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try {
      localStorage.setItem("theme", root.dataset.theme);
    } catch {
      // It holds for this page only, then.
    }
    tell();
  });
  system.addEventListener("change", tell);
  tell();
}

async function start() {
  if (location.search) history.replaceState(null, "", location.pathname + location.hash); // the token is in a cookie now
  startTheme();
  startTabs();
  try {
    const choices = await ask("/api/choices");
    const view = location.hash.startsWith("#run") || (!location.hash && choices.runs.length) ? "run" : "plan";
    show(view);
    startRun(choices.runs);
    startPlan(choices);
  } catch (error) {
    document.getElementById("verdict").textContent = error.message;
  }
}

start();
