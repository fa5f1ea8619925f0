"""The load of a machine is in run folders, in captions of charts of times, and in warnings."""

import json
from pathlib import Path

import pytest

from gradwire_lab.report.charts import figures
from gradwire_lab.report.load import load
from gradwire_lab.report.machine_load import MachineLoad, during, measured, noted_in
from gradwire_lab.report.run_groups import tasks
from gradwire_lab.train import run_recipe
from run_folders import write_run
from training_fixtures import recipe_of, train

BUSY = {"load": 14.2, "cores": 2, "threads": 2}
IDLE = {"load": 1.9, "cores": 2, "threads": 2}


@pytest.mark.parametrize(
    ("load", "cores", "threads", "busy"),
    [(14.2, 2, 2, True), (2.1, 2, 2, False), (4.0, 2, 4, False), (20.0, 64, 8, False), (2.9, 2, 2, False)],
)
def test_busy_is_what_other_work_makes_of_too_few_cores(load: float, cores: int, threads: int, busy: bool) -> None:
    assert MachineLoad(load, cores, threads).busy == busy


def captions(*folders: Path) -> dict[str, str]:
    (task,) = tasks([load(folder) for folder in folders])
    return {figure.name: figure.caption for figure in figures(task)}


def test_charts_of_times_have_the_load(tmp_path: Path) -> None:
    folders = [write_run(tmp_path, "fp32", more=IDLE), write_run(tmp_path, "qsgd(4)", more=BUSY)]
    for name, caption in captions(*folders).items():
        assert ("load was 1.9 to 14.2 on 2 cores" in caption) == (name in ("metric-over-time", "step-time")), name
        assert "slowed fp32" not in caption
    assert "slowed qsgd(4)" in captions(*folders)["step-time"]
    assert "load" not in captions(write_run(tmp_path / "older"))["step-time"]


def test_a_run_notes_the_load_at_its_start_and_after_each_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_recipe.machine_load, "measured", lambda cores, threads: MachineLoad(3.5, cores, threads))
    train(recipe_of("digits"), 2, tmp_path)
    records = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    found = {record["event"]: noted_in(record) for record in records}
    assert found["start"] == found["epoch"] and found["epoch"] is not None and found["step"] is None
    assert found["epoch"].load == 3.5 and during(load(tmp_path)) == found["epoch"]
    assert "3.5" in (tmp_path / "results.csv").read_text()


def test_this_machine_has_a_load() -> None:
    found = measured(2, 1)
    assert found is not None and found.load >= 0 and (found.cores, found.threads) == (2, 1)
