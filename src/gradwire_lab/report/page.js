"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const look = JSON.parse(document.getElementById("look").textContent);
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");

  // The look holds placeholders such as "--ink", which the style sheet fills in for light and dark.
  function filled(value, style) {
    if (typeof value === "string" && value.startsWith("--")) return style.getPropertyValue(value).trim();
    if (value === null || typeof value !== "object" || Array.isArray(value)) return value;
    return Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, filled(inner, style)]));
  }

  let drawn = [];
  async function draw() {
    for (const old of drawn) old.finalize();
    const config = filled(look, getComputedStyle(root));
    const actions = { export: true, source: false, compiled: false, editor: false };
    const plots = [...document.querySelectorAll(".plot")];
    drawn = await Promise.all(plots.map((plot) =>
      vegaEmbed(plot, figures[plot.dataset.figure], { mode: "vega-lite", renderer: "svg", config, actions })));
  }

  function theme(choice) {
    root.dataset.theme = choice;
    try { localStorage.setItem("gradwire-theme", choice); } catch { /* a file may have no storage */ }
    draw();
  }

  function sort(head) {
    const table = head.closest("table");
    const column = [...head.parentElement.children].indexOf(head);
    const upward = head.getAttribute("aria-sort") !== "ascending";
    for (const other of head.parentElement.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", upward ? "ascending" : "descending");
    const rows = [...table.tBodies[0].rows];
    const key = (row) => {
      const cell = row.cells[column];
      return "key" in cell.dataset ? (cell.dataset.key === "" ? NaN : Number(cell.dataset.key)) : cell.textContent;
    };
    const absent = (value) => Number.isNaN(value);
    rows.sort((a, b) => {
      const [x, y] = [key(a), key(b)];
      if (absent(x) || absent(y)) return absent(x) - absent(y);  // what is not known stays below
      return (upward ? 1 : -1) * (typeof x === "number" ? x - y : x.localeCompare(y));
    });
    table.tBodies[0].append(...rows);
  }

  let kept = null;
  try { kept = localStorage.getItem("gradwire-theme"); } catch { /* as above */ }
  if (kept) root.dataset.theme = kept;
  document.getElementById("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : system.matches;
    theme(dark ? "light" : "dark");
  });
  system.addEventListener("change", () => { if (!root.dataset.theme) draw(); });
  for (const head of document.querySelectorAll("table.sortable th")) {
    head.querySelector("button").addEventListener("click", () => sort(head));
  }
  draw();
})();
