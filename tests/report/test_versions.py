"""Runs of a model file that has changed since are not compared with each other."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from gradwire_lab.cli.report import report
from gradwire_lab.report.load import find, load
from gradwire_lab.report.run_groups import Task, tasks
from gradwire_lab.report.versions import fingerprint
from run_folders import write_run

app = typer.Typer()
app.command()(report)
MODEL = {"model.name": "net.py:make"}
CODEC = "mine(2)"  # from a file that only its own runs depend on


def write_version(root: Path, files: dict[str, str], spec: str, seed: int, value: float, began: float) -> None:
    """A run of `gradwire compare`: the folder has a hash in its name where an earlier version has the name already."""
    stem = f"net-{spec}"
    if (root / f"{stem}-{seed}").exists():
        stem = f"{stem}-{fingerprint(files)}"
    folder = write_run(root, spec, seed, epochs=1, values=[value], settings=MODEL, name=stem)
    noted = json.loads((folder / "environment.json").read_text())
    (folder / "environment.json").write_text(json.dumps(noted | {"files": files, "began": began}))
    (folder / "cell.json").write_text(json.dumps({"files": files}))


def found(root: Path) -> list[Task]:
    return tasks([load(folder) for folder in find([root])[0]])


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two versions: the later one is better by 20 points, and has a seed more, whose folder has no hash."""
    for began, (version, lift, seeds) in enumerate((("a" * 64, 0.0, 3), ("b" * 64, 0.2, 4)), 1):
        for seed in range(seeds):
            for spec, loss in (("fp32", 0.0), ("int8", 0.01 + 0.001 * seed)):
                value = 0.7 + lift - loss
                write_version(tmp_path / "runs", {"net.py": version}, spec, seed, value, began)
    return tmp_path / "runs"


def test_a_spec_is_compared_with_the_baseline_of_its_own_version(runs: Path) -> None:
    latest, earlier = found(runs)
    assert latest.version == fingerprint({"net.py": "b" * 64}) and latest.latest and not earlier.latest
    assert [len(group.runs) for group in latest.groups] == [4, 4]
    assert [len(group.runs) for group in earlier.groups] == [3, 3]
    for task, mean in ((latest, -1.15), (earlier, -1.1)):
        (spec,) = (group for group in task.groups if group.spec == "int8")
        assert task.difference(spec).mean == pytest.approx(mean)
    assert [group.label for group in latest.groups] == ["fp32", "int8"]


def test_the_report_shows_the_latest_version_and_says_what_is_left_out(runs: Path) -> None:
    done = CliRunner().invoke(app, [str(runs), "--markdown", "-"])
    assert done.exit_code == 0, done.output
    assert "6 runs of 1 earlier version of a model or data file are left out; --all-versions shows them" in done.stderr
    version = fingerprint({"net.py": "b" * 64})
    assert done.stdout.count("## ") == 1 and f"net.py:make, version {version}, the latest of 2\n" in done.stdout
    assert "90.00" in done.stdout and "70.00" not in done.stdout


def test_all_versions_have_sections_of_their_own(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    done = CliRunner().invoke(app, [str(runs), "--markdown", "-", "--all-versions", "-o", str(out)])
    assert done.exit_code == 0 and done.stderr == "" and done.stdout.count("## ") == 2
    assert f"net.py:make, earlier version {fingerprint({'net.py': 'a' * 64})}\n" in done.stdout
    assert "90.00" in done.stdout and "70.00" in done.stdout
    assert out.read_text().count("<section") == 2


def test_an_edit_changes_no_name_of_a_task(runs: Path) -> None:
    alone = tasks([load(folder) for folder in find([runs])[0] if load(folder).files == {"net.py": "a" * 64}])
    assert [task.name for task in alone] == [found(runs)[0].name] and alone[0].title == alone[0].name


def test_a_codec_of_the_users_own_keeps_its_baseline(tmp_path: Path) -> None:
    """Its file is no file of the baseline. Two versions of it are two ways of doing the same task."""
    net = {"net.py": "a" * 64}
    for seed in range(2):
        write_version(tmp_path, net, "fp32", seed, 0.9, 1)
        write_version(tmp_path, net | {"codec.py": "c" * 64}, CODEC, seed, 0.8, 2)
        write_version(tmp_path, net | {"codec.py": "d" * 64}, CODEC, seed, 0.7, 3)
    (task,) = found(tmp_path)
    leads = sorted(task.difference(group).mean for group in task.groups if not group.dense)
    assert leads == pytest.approx([-20, -10])
    assert len({group.label for group in task.groups}) == 3


def test_runs_that_noted_no_files_are_a_version_of_their_own(runs: Path) -> None:
    write_run(runs, "fp32", 7, settings=MODEL, name="old")
    assert {task.version for task in found(runs)} >= {"unknown"} and len(found(runs)) == 3
