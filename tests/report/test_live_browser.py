"""The page that follows a training, in a real browser: it changes without a blink, and the reader stays put."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chromium import CHROMIUM, Tab, chromium
from gradwire_lab.report.live_page import live_page, replace_file
from gradwire_lab.report.load import RunRecord, load
from run_folders import STEPS, write_run

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on this machine; apt-get install --no-install-recommends chromium"
)
RELOAD = 2  # seconds
LOSS = '[data-figure="digits-cnn-loss-by-step"]'
DRAWN = 'all(".plot").every((plot) => plot.querySelector("svg.marks path"))'
# The step at the top, once all charts are drawn.
STEP = f"""(() => {{
  const all = (selector) => [...document.querySelectorAll(selector)];
  const step = all(".progress dd")[1];
  return step && document.readyState === "complete" && {DRAWN} && parseInt(step.textContent.replace(",", ""));
}})()"""
SEEN = f"""({{
  step: {STEP},
  curve: document.querySelector('{LOSS} .mark-line path').getAttribute("d"),
  paper: getComputedStyle(document.documentElement).backgroundColor,
  axis: getComputedStyle(document.querySelector(".plot svg .role-axis-label text")).fill,
  overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  top: scrollY,
  open: document.querySelector("section > details").open,
}})"""

MOVED = '(document.querySelector("section > details").open = true, scrollTo(0, 321), scrollY === 321)'


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with chromium(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture
def run(tmp_path: Path) -> RunRecord:
    return load(write_run(tmp_path, "topk(0.01) | sign", more={"skipped": 0}))


def after(run: RunRecord, epochs: int) -> RunRecord:
    """The run as it was after some of its epochs."""
    return replace(run, epochs=run.epochs[:epochs], steps=run.steps[: epochs * STEPS], final=None)


def seen(tab: Tab, step: int) -> dict[str, Any]:
    """What the tab shows, once it is at this step."""
    found: dict[str, Any] = tab.until(f"{STEP} === {step} && {SEEN}")
    return found


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (400, False), (400, True)])
def test_a_chart_changes_while_the_training_runs(
    tab: Tab, run: RunRecord, tmp_path: Path, width: int, dark: bool
) -> None:
    path = tmp_path / "live.html"
    replace_file(path, live_page(after(run, 2), RELOAD))
    tab.look(width, dark).call("Page.navigate", url=path.as_uri())
    before = seen(tab, 2 * STEPS)
    assert before["overflow"] == 0
    assert before["paper"] == ("rgb(21, 23, 26)" if dark else "rgb(255, 255, 255)")
    tab.until(f"{STEP} && {MOVED}")

    replace_file(path, live_page(after(run, 4), RELOAD))
    now = seen(tab, 4 * STEPS)
    assert now["curve"] != before["curve"]
    same = {"overflow": 0, "top": 321, "open": True, "paper": before["paper"], "axis": before["axis"]}
    assert {name: now[name] for name in same} == same

    replace_file(path, live_page(run, None))
    last = seen(tab, 6 * STEPS)
    assert last["curve"] != now["curve"] and last["overflow"] == 0 and last["top"] == 321
    assert tab.console == []


# Notes, at every frame that is shown, whether a chart or the head is missing; a page that is loaded again forgets it.
FRAMES = """(window.frames_seen = 0, window.frames_bad = 0, (function look() {
  const plots = [...document.querySelectorAll("main:not(div > main) .plot")];
  const whole = plots.length && plots.every((plot) => plot.querySelector("svg.marks path"));
  frames_seen += 1;
  frames_bad += !(whole && document.querySelector(".progress"));
  requestAnimationFrame(look);
})(), true)"""
SORTED = 'document.querySelector("table.sortable th[aria-sort]")?.textContent'


@pytest.mark.parametrize("dark", [False, True])
def test_no_frame_is_without_charts_while_the_page_changes(
    tab: Tab, run: RunRecord, tmp_path: Path, dark: bool
) -> None:
    path = tmp_path / "live.html"
    replace_file(path, live_page(after(run, 2), RELOAD))
    tab.look(1280, dark).call("Page.navigate", url=path.as_uri())
    seen(tab, 2 * STEPS)
    assert tab.evaluate(FRAMES)
    tab.evaluate('document.querySelectorAll("table.sortable th button")[1].click()')
    chosen = tab.evaluate(SORTED)
    for epochs, reload in ((3, RELOAD), (4, RELOAD), (6, None)):
        replace_file(path, live_page(after(run, epochs), reload))
        assert seen(tab, epochs * STEPS)["overflow"] == 0
        assert tab.evaluate("frames_seen") > 0 and tab.evaluate("frames_bad") == 0
        assert tab.evaluate(SORTED) == chosen
        charts = tab.evaluate('document.querySelectorAll(".plot svg.marks").length')
        assert charts == tab.evaluate('document.querySelectorAll("figure").length') > 0
        assert tab.evaluate('document.querySelectorAll("iframe").length') == 0
    assert tab.evaluate("frames_seen") > 10 and tab.console == []


def test_where_frames_do_not_answer_the_page_loads_itself_again(tab: Tab, run: RunRecord, tmp_path: Path) -> None:
    path = tmp_path / "live.html"
    replace_file(path, live_page(after(run, 2), RELOAD))
    tab.look(1280, dark=False).call("Page.navigate", url=path.as_uri())
    seen(tab, 2 * STEPS)
    shorter = "(wait => { window.setTimeout = (work, after) => wait(work, after / 20); })(window.setTimeout)"
    tab.evaluate(f"window.first = true; document.body.append = () => {{}}; {shorter}; {MOVED}")
    replace_file(path, live_page(after(run, 4), None))
    now = seen(tab, 4 * STEPS)
    assert tab.evaluate("typeof first") == "undefined" and (now["top"], now["open"]) == (321, True)


def test_the_last_page_stays(tab: Tab, run: RunRecord, tmp_path: Path) -> None:
    path = tmp_path / "live.html"
    replace_file(path, live_page(run, None))
    tab.look(1280, dark=False).call("Page.navigate", url=path.as_uri())
    seen(tab, 6 * STEPS)
    replace_file(path, live_page(after(run, 2), RELOAD))  # which a page that loads itself again would show
    tab.until(f"performance.now() > {1000 * RELOAD + 1500}")
    assert seen(tab, 6 * STEPS)["overflow"] == 0 and tab.console == []


def test_before_the_first_epoch(tab: Tab, run: RunRecord, tmp_path: Path) -> None:
    path = tmp_path / "live.html"
    start = replace(run, epochs=(), steps=(), final=None)
    replace_file(path, live_page(start, RELOAD))
    tab.look(400, dark=False).call("Page.navigate", url=path.as_uri())
    tab.until("document.body.textContent.includes('No epoch has ended yet')")
    replace_file(path, live_page(replace(start, steps=run.steps[:9]), RELOAD))
    tab.until(f"document.querySelector('{LOSS} svg.marks path') !== null")
    assert tab.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
    replace_file(path, live_page(after(run, 1), RELOAD))
    assert seen(tab, STEPS)["overflow"] == 0
    assert tab.console == []
