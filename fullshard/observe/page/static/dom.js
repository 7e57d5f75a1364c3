// Small helpers to build elements. Text is set as text, never as HTML.

export function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

// A table of rows of cells. `numbers`: the columns that are aligned to the right.
export function table(head, rows, numbers = []) {
  const cell = (tag, i, content) =>
    make(tag, { class: numbers.includes(i) ? "number" : "", scope: tag === "th" ? "col" : null }, content ?? "–");
  const body = rows.map((row) => make("tr", {}, ...row.map((content, i) => cell("td", i, content))));
  const titles = make("tr", {}, ...head.map((title, i) => cell("th", i, title)));
  const found = make("table", {}, make("thead", {}, titles), make("tbody", {}, ...body));
  return make("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": head.join(", ") }, found);
}

export function options(select, values) {
  const chosen = select.value;
  select.replaceChildren(...values.map((value) => make("option", { value }, String(value))));
  select.value = values.map(String).includes(chosen) ? chosen : String(values[0]);
}
