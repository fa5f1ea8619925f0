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
    for (const plot of plots) plot.style.minHeight = "";
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

  // A page that follows a training loads itself again, and the reader finds it as it was: the place, what is open.
  const all = (selector) => [...document.querySelectorAll(selector)];
  const seconds = Number(document.body.dataset.reload);
  function reload() {
    const place = { top: scrollY, heights: {}, open: all("section > details").map((one) => one.open),
                    across: all(".scroll").map((one) => one.scrollLeft) };
    for (const plot of all(".plot")) place.heights[plot.dataset.figure] = plot.offsetHeight;
    try { sessionStorage.setItem("gradwire-place", JSON.stringify(place)); } catch { /* as above */ }
    location.reload();
  }
  function restore() {
    let place = null;
    try {
      place = JSON.parse(sessionStorage.getItem("gradwire-place"));
      sessionStorage.removeItem("gradwire-place");
    } catch { /* as above */ }
    if (!place) return;
    for (const plot of all(".plot")) plot.style.minHeight = `${place.heights[plot.dataset.figure] ?? 0}px`;  // until drawn
    all("section > details").forEach((one, i) => { one.open = place.open[i] ?? false; });
    all(".scroll").forEach((one, i) => { one.scrollLeft = place.across[i] ?? 0; });
    scrollTo(0, place.top);
  }
  if (seconds) setTimeout(() => {
    if (!document.hidden) reload();
    else document.addEventListener("visibilitychange", reload, { once: true });
  }, 1000 * seconds);

  document.getElementById("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : system.matches;
    theme(dark ? "light" : "dark");
  });
  system.addEventListener("change", () => { if (!root.dataset.theme) draw(); });
  for (const head of document.querySelectorAll("table.sortable th")) {
    head.querySelector("button").addEventListener("click", () => sort(head));
  }
  restore();
  draw();
})();
