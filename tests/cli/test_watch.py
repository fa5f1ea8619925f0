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


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    refused = run(str(tmp_path))
    assert refused.exit_code == 2 and str(tmp_path) in refused.stderr


def test_curves_rise_and_fall() -> None:
    assert curve([0.0, 3.5, 7.0, float("nan")]) == f"{BARS[0]}{BARS[4]}{BARS[7]} "
    assert len(curve([float(i) for i in range(1000)])) == 60 and curve([2.0]) == BARS[0]
