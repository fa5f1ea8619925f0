"use strict";
(() => {
  const CONTENT = "gradwire-content";  // in the address of a frame: it is asked for what it holds, and shows nothing
  let figures = JSON.parse(document.getElementById("figures").textContent);
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
    drawn = await embed(document);
  }

  async function embed(place) {
    const config = filled(look, getComputedStyle(root));
    const actions = { export: true, source: false, compiled: false, editor: false };
    const plots = [...place.querySelectorAll(".plot")];
    const made = await Promise.all(plots.map((plot) =>
      vegaEmbed(plot, figures[plot.dataset.figure], { mode: "vega-lite", renderer: "svg", config, actions })));
    for (const plot of plots) plot.style.minHeight = "";
    return made;
  }

  const shade = () => root.dataset.theme || (system.matches ? "dark" : "light");

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

  // A page that follows a training shows what its file holds now, without being loaded again, which would blink. A
  // file may not be fetched by a page that was opened as a file, but it may be a frame of it, and frames send messages.
  const all = (selector, inside = document) => [...inside.querySelectorAll(selector)];
  const LATE = 10000;  // milliseconds that a frame has to answer

  function follow(seconds) {
    if (seconds) setTimeout(() => {
      if (!document.hidden) ask();
      else document.addEventListener("visibilitychange", ask, { once: true });
    }, 1000 * seconds);
  }

  function ask() {
    const frame = document.createElement("iframe");
    const late = setTimeout(reload, LATE);
    addEventListener("message", function take({ source, data }) {
      if (source !== frame.contentWindow) return;
      removeEventListener("message", take);
      clearTimeout(late);
      frame.remove();
      show(data).then(() => follow(data.seconds), reload);
    });
    frame.hidden = true;
    frame.src = `${location.href.split(/[?#]/)[0]}?${CONTENT}=${Date.now()}`;
    document.body.append(frame);
  }

  // What a frame answers. Its charts are drawn by who asked.
  const content = () => ({ title: document.title, subtitle: document.querySelector("header p").textContent, figures,
                           main: document.querySelector("main").innerHTML, seconds: Number(document.body.dataset.reload) });

  // Draws new content where it is not seen, and puts it into the place of the old at once.
  async function show(fresh) {
    const old = document.querySelector("main"), main = document.createElement("main"), stage = document.createElement("div");
    main.innerHTML = fresh.main;
    stage.style.cssText = `position: absolute; visibility: hidden; height: 0; overflow: hidden; width: ${old.offsetWidth}px`;
    stage.append(main);
    old.after(stage);
    figures = fresh.figures;
    const style = shade(), made = await embed(main), place = noted(old);
    document.title = fresh.title;
    document.querySelector("header p").textContent = fresh.subtitle;
    old.replaceWith(main);
    stage.remove();
    for (const one of drawn) one.finalize();
    drawn = made;
    listen();
    restore(place);
    if (style !== shade()) draw();
  }

  // The reader finds the page as it was: the place, what is open, how tables are sorted.
  const noted = (main) => ({
    top: scrollY,
    open: all("section > details", main).map((one) => one.open),
    across: all(".scroll", main).map((one) => one.scrollLeft),
    sorted: all("table.sortable", main).map((one) => all("th", one).map((head) => head.getAttribute("aria-sort"))),
  });
  function restore(place) {
    all("section > details").forEach((one, i) => { one.open = place.open[i] ?? false; });
    all("table.sortable").forEach((one, i) => all("th", one).forEach((head, j) => {
      const order = place.sorted[i]?.[j];
      if (order) sort(head);
      if (order === "descending") sort(head);
    }));
    all(".scroll").forEach((one, i) => { one.scrollLeft = place.across[i] ?? 0; });
    scrollTo(0, place.top);
  }

  // Where frames are not allowed, the page is loaded again after all.
  function reload() {
    const heights = Object.fromEntries(all(".plot").map((plot) => [plot.dataset.figure, plot.offsetHeight]));
    try { sessionStorage.setItem("gradwire-place", JSON.stringify({ ...noted(document), heights })); } catch { /* as above */ }
    location.reload();
  }
  function restoreAfterReload() {
    let place = null;
    try {
      place = JSON.parse(sessionStorage.getItem("gradwire-place"));
      sessionStorage.removeItem("gradwire-place");
    } catch { /* as above */ }
    if (!place) return;
    for (const plot of all(".plot")) plot.style.minHeight = `${place.heights[plot.dataset.figure] ?? 0}px`;  // until drawn
    restore(place);
  }

  function listen() {
    for (const head of all("table.sortable th")) head.querySelector("button").addEventListener("click", () => sort(head));
  }

  if (parent !== window && new URLSearchParams(location.search).has(CONTENT)) {
    parent.postMessage(content(), "*");
    return;
  }
  document.getElementById("theme").addEventListener("click", () => {
    theme(shade() === "dark" ? "light" : "dark");
  });
  system.addEventListener("change", () => { if (!root.dataset.theme) draw(); });
  listen();
  restoreAfterReload();
  draw();
  follow(Number(document.body.dataset.reload));
})();
