"""A training that runs, seen from another terminal."""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from gradwire_lab.cli import watch
from gradwire_lab.cli.main import app
from gradwire_lab.cli.watch import BARS, curve
from gradwire_lab.train.run_folder import locked
from run_folders import write_run


def run(*words: str):
    return CliRunner().invoke(app, ["watch", *words], env={"COLUMNS": "80"})


def test_a_run_is_shown(tmp_path: Path) -> None:
    shown = run(str(write_run(tmp_path, "topk(0.01) | sign", ended=False)))
    assert shown.exit_code == 0, shown.output
    for words in ("topk(0.01) | sign", "loss", "accuracy", "sent", "smaller than float32", "skipped", "left"):
        assert words in shown.stdout
    assert max(map(len, shown.stdout.splitlines())) <= 80
    assert "ended" in run(str(write_run(tmp_path, "fp32"))).stdout


def test_a_training_that_went_quiet_is_shown(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "sign", ended=False)
    assert "no record for" not in run(str(folder)).stdout
    old = time.time() - 1000
    os.utime(folder / "run.jsonl", (old, old))
    shown = run(str(folder)).stdout
    assert "no record for 0:16:4" in shown and "left" not in shown and "not ended" in shown
    ended = write_run(tmp_path, "fp32")
    os.utime(ended / "run.jsonl", (old, old))
    assert "no record for" not in run(str(ended)).stdout


def test_one_worker_is_one_worker(tmp_path: Path) -> None:
    assert "1 worker\n" in re.sub(r" +\n", "\n", run(str(write_run(tmp_path, "fp32", world=1))).stdout)


def test_a_busy_machine_is_shown(tmp_path: Path) -> None:
    busy = write_run(tmp_path, more={"load": 14.2, "cores": 2, "threads": 2})
    assert "load 14.2 on 2 cores, busy" in run(str(busy)).stdout


def test_a_narrow_terminal_cuts_no_name(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "fp32", name="a-name-that-is-longer-than-the-terminal-is-wide")
    shown = CliRunner().invoke(app, ["watch", str(folder)], env={"COLUMNS": "40"})
    assert shown.exit_code == 0 and "…" not in shown.stdout


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    os.utime(tmp_path, (0, 0))
    refused = run(str(tmp_path))
    assert refused.exit_code == 2 and str(tmp_path) in refused.stderr and "waiting" not in refused.stderr


def test_a_folder_of_runs_names_one_of_them(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "fp32")
    refused = run(str(tmp_path))
    assert refused.exit_code == 2 and folder.name in refused.stderr and "waiting" not in refused.stderr


def test_a_folder_that_never_comes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "PATIENCE", 0.5)
    refused = run(str(tmp_path / "digits-0"))
    assert refused.exit_code == 2 and "waiting for the first record" in refused.stderr
    assert "there is no folder" in refused.stderr
    assert "waiting" not in run(str(tmp_path / "digits-0"), "--once").stderr


@pytest.fixture
def asleep(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """What happens while the command sleeps, one after the other."""
    happens: list[Callable[[], object]] = []
    clock = SimpleNamespace(monotonic=time.monotonic, time=time.time, sleep=lambda seconds: happens.pop(0)())
    monkeypatch.setattr(watch, "time", clock)
    return happens


def test_a_training_that_has_just_begun_is_awaited(tmp_path: Path, asleep: list[Callable[[], object]]) -> None:
    made, folder = write_run(tmp_path / "elsewhere", "sign", name="digits", ended=False), tmp_path / "digits-0"
    asleep += [lambda: None, lambda: made.rename(folder)]
    shown = run(str(folder))
    assert shown.exit_code == 0 and "accuracy" in shown.stdout
    assert shown.stderr.count("waiting for the first record") == 1


def test_a_training_that_compiles_for_long_is_awaited(tmp_path: Path, asleep: list[Callable[[], object]]) -> None:
    made, folder = write_run(tmp_path / "elsewhere", "sign", ended=False), tmp_path / "digits-0"
    with locked(folder):
        os.utime(folder, (0, 0))  # longer ago than a new folder is waited for
        asleep += [lambda: None, lambda: (made / "run.jsonl").rename(folder / "run.jsonl")]
        shown = run(str(folder))
    assert shown.exit_code == 0 and "accuracy" in shown.stdout and "waiting for the first record" in shown.stderr


def test_a_lock_whose_process_is_dead_is_not_waited_for(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (tmp_path / "run.lock").write_text(f"process {ended.pid} on {socket.gethostname()}")
    os.utime(tmp_path, (0, 0))
    refused = run(str(tmp_path))
    assert refused.exit_code == 2 and "waiting" not in refused.stderr


def test_curves_rise_and_fall() -> None:
    assert curve([0.0, 3.0, 6.0, float("nan")]) == f"{BARS[0]}{BARS[3]}{BARS[6]} "
    assert len(curve([float(i) for i in range(1000)])) == 60 and curve([2.0]) == BARS[0]
