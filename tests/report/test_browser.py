"""The page in a real browser: charts draw, a table sorts, the theme turns, nothing complains."""

import json
import os
import re
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from chromium import CHROMIUM, FLAGS
from gradwire_lab.report.load import find, load
from gradwire_lab.report.page import page
from gradwire_lab.report.run_groups import tasks
from run_folders import write_grid

# Appended to a copy of the page: does what a reader would, and writes down what came of it.
READER = """
<script>
(async () => {
  const until = async (ready) => { while (!ready()) await new Promise((go) => setTimeout(go, 50)); };
  const plots = () => [...document.querySelectorAll(".plot")];
  const drawn = () => plots().every((plot) => plot.querySelector("svg.marks path"));
  const axis = () => getComputedStyle(document.querySelector(".plot svg .role-axis-label text")).fill;
  const first = () => [...document.querySelectorAll("tbody tr td:first-child")].map((cell) => cell.textContent);
  await until(drawn);
  const told = { plots: plots().map((plot) => {
    const box = plot.querySelector("svg").getBoundingClientRect();
    return { name: plot.dataset.figure, width: box.width, height: box.height,
             marks: plot.querySelectorAll(".mark-symbol path, .mark-line path, .mark-rect path").length };
  }) };
  const heads = [...document.querySelectorAll("th button")];
  const sent = heads.find((head) => head.textContent.includes("sent"));
  sent.click(); told.upward = first();
  sent.click(); told.downward = first();
  heads[0].click(); told.by_name = first();
  told.sorted = sent.closest("table").querySelectorAll("th[aria-sort]").length;
  told.before = [getComputedStyle(document.body.parentElement).backgroundColor, axis()];
  document.getElementById("theme").click();
  await until(() => axis() !== told.before[1]);
  await until(drawn);
  told.after = [getComputedStyle(document.body.parentElement).backgroundColor, axis()];
  told.overflow = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  const note = document.createElement("pre");
  note.id = "told"; note.textContent = JSON.stringify(told); document.body.append(note);
})();
</script>
"""

# What does not fit into a narrow page: the page itself, names in legends, and titles of axes.
NARROW = """
<script>
(async () => {
  const plots = () => [...document.querySelectorAll(".plot")];
  while (!plots().every((plot) => plot.querySelector("svg.marks path"))) await new Promise((go) => setTimeout(go, 50));
  const told = { overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth, names: [] };
  told.cut = plots().flatMap((plot) => {
    const edge = plot.querySelector("svg").getBoundingClientRect();
    const inside = (box) =>
      box.left > edge.left - 1 && box.right < edge.right + 1 && box.bottom < edge.bottom + 1;
    const names = [...plot.querySelectorAll(".role-legend-label text")];
    told.names.push(...names.map((name) => name.textContent));
    const texts = [...names, ...plot.querySelectorAll(".role-axis-title text")];
    return texts.filter((text) => !inside(text.getBoundingClientRect())).map((text) => text.textContent);
  });
  told.first = getComputedStyle(document.querySelector("tbody td")).position;
  const note = document.createElement("pre");
  note.id = "told"; note.textContent = JSON.stringify(told); document.body.append(note);
})();
</script>
"""

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on this machine; apt-get install --no-install-recommends chromium"
)


def opened(folder: Path, reader: str, width: int) -> dict[str, Any]:
    """What a script finds on the page of a grid; ``console`` has the messages of the browser."""
    write_grid(folder / "runs")
    text = page(tasks([load(run) for run in find([folder / "runs"])[0]]))
    copy = folder / "page.html"
    body, end, rest = text.rpartition("</body>")
    copy.write_text(body + reader + end + rest)
    assert CHROMIUM is not None
    size = (f"--window-size={width},700", f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=10000")
    done = subprocess.run(
        [
            CHROMIUM,
            *FLAGS,
            "--virtual-time-budget=10000",
            "--enable-logging=stderr",
            *size,
            "--dump-dom",
            copy.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
        env={**os.environ, "HOME": str(folder)},
    )
    found = re.search(r'<pre id="told">(.*?)</pre>', done.stdout, flags=re.DOTALL)
    assert found, done.stderr[-2000:]
    said: dict[str, Any] = json.loads(unescape(found[1]))
    said["console"] = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return said


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return opened(tmp_path_factory.mktemp("browser"), READER, 1000)


def test_a_page_of_400_pixels_cuts_no_name(tmp_path: Path) -> None:
    narrow = opened(tmp_path, NARROW, 400)
    assert narrow["overflow"] == 0 and narrow["cut"] == [] and "topk(0.01) | sign" in narrow["names"]
    assert narrow["first"] == "sticky"


def test_every_chart_draws(told: dict[str, Any]) -> None:
    assert len(told["plots"]) == 7
    for plot in told["plots"]:
        assert plot["width"] > 200 and plot["height"] > 100, plot
        assert plot["marks"] > 0, plot
    assert told["overflow"] == 0


def test_a_click_on_a_head_sorts(told: dict[str, Any]) -> None:
    by_bytes = ["dgc(0.001)", "topk(0.01) | sign", "terngrad", "qsgd(4)", "fp32"]
    assert told["upward"] == by_bytes
    assert told["downward"] == by_bytes[::-1]
    assert told["by_name"] == sorted(by_bytes)
    assert told["sorted"] == 1


def test_light_turns_dark(told: dict[str, Any]) -> None:
    assert told["before"][0] == "rgb(255, 255, 255)"
    assert told["after"][0] == "rgb(21, 23, 26)"
    assert told["after"][1] != told["before"][1]


def test_the_console_stays_empty(told: dict[str, Any]) -> None:
    assert told["console"] == []
