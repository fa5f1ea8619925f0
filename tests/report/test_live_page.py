"""The page that follows a training: written while the log grows, whole at any time, and at rest in the end."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from typer.testing import CliRunner

from gradwire_lab.cli import watch as command
from gradwire_lab.cli.main import app
from gradwire_lab.report import live_page
from gradwire_lab.report.live_page import RELOAD, LivePage, replace_file
from gradwire_lab.report.load import load
from gradwire_lab.report.progress import progress
from run_folders import STEPS, write_run

RELOADS = re.compile(r'<body data-reload="(\d+)">')


class Clock:
    """Time that passes when it is told to, and while someone sleeps; what happens meanwhile is ``woken``."""

    strftime = staticmethod(time.strftime)

    def __init__(self) -> None:
        self.now = 0.0
        self.woken: Iterator[None] = iter(())

    def monotonic(self) -> float:
        return self.now

    process_time = monotonic

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        next(self.woken)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (live_page, command):
        monkeypatch.setattr(module, "time", made)
    return made


def grow(folder: Path, epochs: int, ended: bool = False) -> Path:
    """The run as it is after these epochs, in place."""
    with TemporaryDirectory() as other:
        grown = write_run(Path(other), "sign", epochs=epochs, ended=ended)
        for name in ("run.jsonl", "recipe.toml"):
            replace_file(folder / name, (grown / name).read_text())
    return folder


def words(text: str) -> dict[str, str]:
    """What stands at the top of a page."""
    return dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", text))


def test_the_page_follows_the_log_and_comes_to_rest(tmp_path: Path, clock: Clock) -> None:
    folder, path = grow(tmp_path / "run-0", 1), tmp_path / "out" / "live.html"
    seen: list[tuple[float, str]] = []

    def training() -> Iterator[None]:
        for look in range(12):
            seen.append((clock.now, path.read_text()))
            grow(folder, 2 + look, ended=look == 11)
            yield

    clock.woken = training()
    done = CliRunner().invoke(app, ["watch", str(folder), "--page", str(path)], catch_exceptions=False)
    assert done.exit_code == 0 and str(path) in done.stdout and "ended" in done.stdout
    steps = [int(words(text)["step"].split(" of ")[0]) for _, text in seen]
    written = [now for (now, _), before, after in zip(seen, [-1, *steps], steps, strict=False) if before != after]
    assert steps[0] == STEPS and steps[-1] > 6 * STEPS and steps == sorted(steps)
    assert len(written) == 4 and min(b - a for a, b in pairwise(written)) >= RELOAD
    assert all(RELOADS.search(text) for _, text in seen)
    last = path.read_text()
    assert not RELOADS.search(last) and "The training has ended" in last and "unfinished" not in last
    assert [file.name for file in path.parent.iterdir()] == ["live.html"]


def test_a_log_that_has_not_changed_is_not_written_again(tmp_path: Path, clock: Clock) -> None:
    folder, page = grow(tmp_path / "run-0", 1), LivePage(tmp_path / "live.html")
    page.look(load(folder))
    first = page.path.stat().st_ino, page.path.stat().st_mtime_ns
    clock.now += 100
    page.look(load(folder))
    assert (page.path.stat().st_ino, page.path.stat().st_mtime_ns) == first
    old = time.time() - 120.5
    os.utime(folder / "run.jsonl", (old, old))
    page.look(load(folder))
    assert words(page.path.read_text())["quiet"].startswith("no record for 0:02:0")


def test_a_page_that_takes_long_is_written_less_often(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(path: Path, text: str) -> None:
        clock.now += 2
        replace_file(path, text)

    monkeypatch.setattr(live_page, "replace_file", slow)
    folder, page = grow(tmp_path / "run-0", 1), LivePage(tmp_path / "live.html")
    shown = []
    for epochs in (1, 2, 3):
        page.look(load(grow(folder, epochs)))
        text = page.path.read_text()
        shown.append((words(text)["step"].split(" of ")[0], RELOADS.search(text)[1]))
        clock.now += 30
    assert shown == [(f"{STEPS}", f"{RELOAD}"), (f"{STEPS}", f"{RELOAD}"), (f"{3 * STEPS}", "40")]


def test_words_are_those_of_the_terminal(tmp_path: Path) -> None:
    folder, path = write_run(tmp_path, "topk(0.01) | sign", ended=False, more={"skipped": 3}), tmp_path / "live.html"
    done = CliRunner().invoke(app, ["watch", str(folder), "--once", "--page", str(path)], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    text = path.read_text()
    found = words(text)
    assert {"loss", "sent", "payload", "skipped", "step"} <= set(found) and found["skipped"] == "3 steps"
    shown = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if line[0] != " ")
    assert all(shown[name].startswith(found[name]) for name in ("loss", "sent", "payload", "skipped", "step"))
    assert not RELOADS.search(text) and "no longer updated" in text  # because nobody will


def test_before_the_first_epoch_there_is_the_loss(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "sign", epochs=1, ended=False)
    lines = (folder / "run.jsonl").read_text().splitlines(keepends=True)
    for count, charts in ((1, []), (8, ["digits-cnn-loss-by-step"])):
        (folder / "run.jsonl").write_text("".join(lines[:count]))
        text = live_page.live_page(load(folder), RELOAD)
        (specs,) = re.findall(r'<script type="application/json" id="figures">(.*?)</script>', text)
        assert list(json.loads(specs)) == charts and "No epoch has ended yet" in text
        assert words(text)["skipped"] == "not known before an epoch has ended"


def test_readers_see_whole_pages(tmp_path: Path) -> None:
    path, ended, seen = tmp_path / "live.html", threading.Event(), set()
    pages = [letter * 3_000_000 for letter in "ab"]
    replace_file(path, pages[0])

    def read() -> None:
        while not ended.is_set():
            text = path.read_text()
            seen.add((text[0], len(text), text.count(text[0])))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for i in range(60):
            replace_file(path, pages[i % 2])
    finally:
        ended.set()
        reader.join()
    assert seen <= {(letter, 3_000_000, 3_000_000) for letter in "ab"} and len(seen) == 2


def test_a_page_that_is_not_written_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "live.html"
    replace_file(path, "old")
    with pytest.raises(UnicodeEncodeError):
        replace_file(path, "new \ud800")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


@contextmanager
def watching(folder: Path, path: Path) -> Iterator[subprocess.Popen[str]]:
    code = "from gradwire_lab.command import run; run()"
    words = ["watch", str(folder), "--every", "0.1", "--page", str(path)]
    with subprocess.Popen([sys.executable, "-c", code, *words], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_watch_that_is_stopped_leaves_a_page_at_rest(tmp_path: Path, number: signal.Signals) -> None:
    folder, path = write_run(tmp_path, "sign", ended=False), tmp_path / "live.html"
    with watching(folder, path) as process:
        end = time.monotonic() + 60
        while not path.exists():
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.05)
        assert RELOADS.search(path.read_text())
        process.send_signal(number)
        assert process.wait(60) == 0
    assert not RELOADS.search(path.read_text()) and "before the training ended" in path.read_text()


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(tmp_path, "sign")
    monkeypatch.delitem(sys.modules, "gradwire_lab.report.live_page")
    monkeypatch.delitem(sys.modules, "gradwire_lab.report.page", raising=False)
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    done = CliRunner().invoke(app, ["watch", str(folder), "--page", str(tmp_path / "live.html")])
    assert done.exit_code == 1 and "pip install 'gradwire[report]'" in done.stderr
    assert CliRunner().invoke(app, ["watch", str(folder)]).exit_code == 0
    assert "gradwire[report]" in " ".join(CliRunner().invoke(app, ["watch", "--help"]).stdout.split())


def test_a_page_without_a_place_is_refused(tmp_path: Path) -> None:
    folder, taken = write_run(tmp_path, "sign"), tmp_path / "taken"
    taken.write_text("no folder")
    for page, words in ((tmp_path, f"{tmp_path} is a folder"), (taken / "live.html", f"cannot use {taken}")):
        done = CliRunner().invoke(app, ["watch", str(folder), "--page", str(page)])
        assert done.exit_code == 2 and words in done.stderr, done.output


def test_skipped_steps_are_shown_while_a_run_goes_on(tmp_path: Path) -> None:
    """Records of steps do not have them, those of epochs do."""
    lines = {line.name: line.text for line in progress(load(write_run(tmp_path, ended=False, more={"skipped": 1})))}
    assert lines["skipped"] == "1 step"
