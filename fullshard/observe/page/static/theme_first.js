// Before anything is drawn, so that a dark page does not flash in white.
try {
  const chosen = localStorage.getItem("theme");
  if (chosen) document.documentElement.dataset.theme = chosen;
} catch {
  // A browser may forbid storage: then the system's theme holds.
}
