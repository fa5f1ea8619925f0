"""A training that runs, seen from another terminal."""

from pathlib import Path

from typer.testing import CliRunner

from gradwire_lab.cli.main import app
from gradwire_lab.cli.watch import BARS, curve
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


def test_a_busy_machine_is_shown(tmp_path: Path) -> None:
    busy = write_run(tmp_path, more={"load": 14.2, "cores": 2, "threads": 2})
    assert "load 14.2 on 2 cores, busy" in run(str(busy)).stdout


def test_a_narrow_terminal_cuts_no_name(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "fp32", name="a-name-that-is-longer-than-the-terminal-is-wide")
    shown = CliRunner().invoke(app, ["watch", str(folder)], env={"COLUMNS": "40"})
    assert shown.exit_code == 0 and "…" not in shown.stdout


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    refused = run(str(tmp_path))
    assert refused.exit_code == 2 and str(tmp_path) in refused.stderr


def test_curves_rise_and_fall() -> None:
    assert curve([0.0, 3.5, 7.0, float("nan")]) == f"{BARS[0]}{BARS[4]}{BARS[7]} "
    assert len(curve([float(i) for i in range(1000)])) == 60 and curve([2.0]) == BARS[0]
