// Numbers as text, in the same words and units as the command line.

export function bytes(n) {
  return scaled(n, 1024, ["B", "KiB", "MiB", "GiB", "TiB"], " ");
}

export function count(n) {
  return scaled(n, 1000, ["", "K", "M", "B", "T"], "");
}

export function seconds(n) {
  return scaled(n * 1e6, 1000, ["µs", "ms", "s"], " ");
}

export function percent(n) {
  return n === null || n === undefined ? "–" : `${(100 * n).toFixed(1)}%`;
}

export function clock(unixSeconds) {
  return unixSeconds ? new Date(1000 * unixSeconds).toLocaleString() : "–";
}

export function number(n, places = 4) {
  return n === null || n === undefined ? "–" : Number(n).toPrecision(places);
}

function scaled(n, base, units, gap) {
  if (n === null || n === undefined || !Number.isFinite(n)) return "–";
  let at = 0;
  while (at < units.length - 1 && Number(Math.abs(n).toFixed(at ? 2 : 0)) >= base) {
    n /= base;
    at += 1;
  }
  const places = at ? 2 : units[0] === "B" || units[0] === "" ? 0 : 2;
  return `${n.toFixed(places)}${gap}${units[at]}`;
}
