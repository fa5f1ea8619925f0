"""The grid: what is skipped, resumed, stopped and refused, and what it says in the end."""

import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from gradwire_lab.cli import compare as command
from gradwire_lab.cli.main import app as whole
from gradwire_lab.report.load import finished, load
from gradwire_lab.train.compare import Arm, CellFailed, OutOfTime, arms, grid, outcome, run_grid
from gradwire_lab.train.grid_time import GridTime
from gradwire_lab.train.grid_worker import TrainCommand
from gradwire_lab.train.recipe_files import resolve
from run_folders import write_run

SPECS = "fp32; topk(0.01)|sign"
VALUES = {"fp32": [0.94, 0.944, 0.941], "topk(0.01)|sign": [0.939, 0.942, 0.942]}

app = typer.Typer()
app.command()(command.compare)


class Runner:
    """Leaves the files of a finished run. ``trouble`` says, cell by cell, what comes in between."""

    def __init__(self, **trouble: Exception) -> None:
        self.calls: list[str] = []
        self.trouble = trouble

    def __call__(self, recipes: tuple[str, ...], overrides: tuple[str, ...], folder: Path) -> None:
        self.calls.append(folder.name)
        told = dict(override.split("=", 1) for override in overrides)
        spec, seed = told["sync.spec"], int(told["train.seed"])
        wrong = self.trouble.pop(f"call{len(self.calls)}", None)
        shutil.rmtree(folder / "made", ignore_errors=True)
        made = write_run(folder / "made", spec, seed, epochs=1, values=[VALUES[spec][seed]], ended=wrong is None)
        for file in made.iterdir():
            shutil.copy(file, folder)
        shutil.rmtree(folder / "made")
        if wrong is not None:
            raise wrong

    def stop(self) -> None:
        self.calls.append("stop")


class Pair(Runner):
    """Needs two cells at once: each waits for the other."""

    def __init__(self) -> None:
        super().__init__()
        self.both = threading.Barrier(2)

    def __call__(self, recipes: tuple[str, ...], overrides: tuple[str, ...], folder: Path) -> None:
        self.both.wait(100)
        super().__call__(recipes, overrides, folder)


class Interrupted(Runner):
    """The first cell meets with Ctrl-C, while the other is killed by our own hand."""

    def __init__(self) -> None:
        super().__init__()
        self.stopped, self.both = threading.Event(), threading.Barrier(2)

    def __call__(self, recipes: tuple[str, ...], overrides: tuple[str, ...], folder: Path) -> None:
        self.both.wait(100)
        if folder.name == "digits-fp32-0":
            raise KeyboardInterrupt
        self.stopped.wait(100)
        raise RuntimeError("gradwire train ended with code -15")

    def stop(self) -> None:
        self.stopped.set()


def quiet(_: str) -> None: ...


def test_specs_are_parted_and_may_carry_settings() -> None:
    assert arms(" fp32 ;topk(0.01)|sign @ optimizer.lr=0.1 @ sync.granularity=model;") == (
        Arm("fp32"),
        Arm("topk(0.01)|sign", ("optimizer.lr=0.1", "sync.granularity=model")),
    )
    assert arms("fp32; int4; exchange=two_way; bundle=none @ optimizer.lr=0.1") == (
        Arm("fp32"),
        Arm("int4", ("sync.exchange=two_way", "sync.bundle=none", "optimizer.lr=0.1")),
    )
    with pytest.raises(ValueError, match="no spec"):
        arms(" ; ")
    with pytest.raises(ValueError, match="share a run folder"):
        arms("topk(0.01)|sign; topk(0.01) | sign")


def test_cells_come_seed_by_seed_and_say_what_they_are(tmp_path: Path) -> None:
    made = grid(["digits", "some/fast.toml"], arms(SPECS), range(2), ["train.epochs=1"], tmp_path, "quick")
    assert [cell.folder.name for cell in made] == [
        "digits+fast-quick-fp32-0",
        "digits+fast-quick-topk-0.01-sign-0",
        "digits+fast-quick-fp32-1",
        "digits+fast-quick-topk-0.01-sign-1",
    ]
    assert made[1].overrides == ("train.epochs=1", "sync.spec=topk(0.01)|sign", "train.seed=0")


def test_finished_cells_are_skipped_and_broken_ones_go_on(tmp_path: Path) -> None:
    made = grid(["digits"], arms(SPECS), range(2), runs=tmp_path)
    runner = Runner(call2=OutOfTime())
    progress = run_grid(made, runner, log=quiet)
    assert [cell.folder.name for cell in progress.ran] == ["digits-fp32-0"]
    assert [cell.folder.name for cell in progress.left] == [cell.folder.name for cell in made[1:]]
    assert not finished(made[1].folder)

    runner = Runner()
    said: list[str] = []
    progress = run_grid(made, runner, log=said.append)
    assert runner.calls == [cell.folder.name for cell in made[1:]]
    assert [cell.folder.name for cell in progress.skipped] == ["digits-fp32-0"]
    assert "finished before" in said[0] and "continues" in said[1] and "starts" in said[2]
    assert run_grid(made, Runner(), log=quiet).skipped == made


def test_the_time_left_warns_of_kernels_until_every_spec_was_trained(tmp_path: Path) -> None:
    said: list[str] = []
    run_grid(grid(["digits"], arms(SPECS), range(2), runs=tmp_path), Runner(), log=said.append)
    assert "left" not in said[0], "nothing is known yet"
    assert ["kernels are compiled" in line for line in said] == [False, True, False, False]
    assert all("left in all" in line for line in said[1:])


def test_the_time_left_leaves_out_kernels_that_were_compiled() -> None:
    left = GridTime(["fp32", "int8", "int4"] * 3)
    assert left.text == "", "nothing is known yet"
    left.finish("fp32", trained=4, whole=10)
    assert left.text == "about 0:01:20 left", "eight more such"
    left.finish("int8", trained=6, whole=40)  # which compiled for 28 seconds
    assert left.text == "about 0:01:17 left", "2 x 4 + 2 x 6 + 3 x 5, and 6 to start each of seven"
    left.skip("int4")
    left.finish("fp32", trained=3, whole=9)
    assert left.text == "about 0:00:54 left", "3 + 2 x 6 + 2 x 4.5, and 6 to start each of five"


def test_the_budget_stops_before_the_next_cell(tmp_path: Path) -> None:
    made = grid(["digits"], arms(SPECS), range(3), runs=tmp_path)
    hours = iter(range(100))
    runner = Runner()
    progress = run_grid(made, runner, budget_seconds=2.5, log=quiet, clock=lambda: float(next(hours)))
    assert len(runner.calls) == 2 and len(progress.left) == 4


def test_several_cells_run_at_once(tmp_path: Path) -> None:
    made = grid(["digits"], arms(SPECS), range(2), runs=tmp_path)
    progress = run_grid(made, Pair(), log=quiet, jobs=2)
    assert len(progress.ran) == 4 and not progress.failed


def test_a_refusal_ends_what_runs_beside_it(tmp_path: Path) -> None:
    made = grid(["digits"], arms(SPECS), range(2), runs=tmp_path)
    runner = Runner(call1=ValueError("no such key"))
    with pytest.raises(ValueError, match="no such key"):
        run_grid(made, runner, log=quiet)
    assert runner.calls[-1] == "stop"


def test_what_is_stopped_has_not_failed(tmp_path: Path) -> None:
    made, said = grid(["digits"], arms(SPECS), range(1), runs=tmp_path), list[str]()
    with pytest.raises(KeyboardInterrupt):
        run_grid(made, Interrupted(), log=said.append, jobs=2)
    assert len(said) == 2 and all("starts" in line for line in said)


def test_a_failed_cell_does_not_stop_the_others(tmp_path: Path) -> None:
    made = grid(["digits"], arms(SPECS), range(2), runs=tmp_path)
    progress = run_grid(made, Runner(call1=RuntimeError("rank 2 died")), log=quiet)
    assert [why for _, why in progress.failed] == ["rank 2 died"]
    assert len(progress.ran) == 3


class Broken(Runner):
    """Fails in the first step, as a model does whose layers do not fit: the log has its start alone."""

    def __call__(self, recipes: tuple[str, ...], overrides: tuple[str, ...], folder: Path) -> None:
        self.calls.append(folder.name)
        (folder / "run.jsonl").write_text('{"event": "start", "step": 0}\n')
        raise RuntimeError("RuntimeError: shapes cannot be multiplied")


def test_a_model_that_cannot_run_ends_the_grid_at_its_first_cell(tmp_path: Path) -> None:
    arm, runner, said = Arm("fp32"), Broken(), list[str]()
    first = grid(["digits"], [arm], range(3), runs=tmp_path, files={arm: {"mine.py": "aaaa"}})
    with pytest.raises(CellFailed, match=r"^fp32, seed 0 failed before its first result: .*shapes cannot"):
        run_grid(first, runner, log=said.append)
    assert runner.calls == ["digits-fp32-0", "stop"] and len(said) == 1
    mended = grid(["digits"], [arm], range(3), runs=tmp_path, files={arm: {"mine.py": "bbbb"}})
    assert [cell.folder for cell in mended] == [cell.folder for cell in first]
    assert len(run_grid(mended, Runner(), log=quiet).ran) == 3


def test_a_later_cell_that_cannot_run_does_not_stop_the_others(tmp_path: Path) -> None:
    made = grid(["digits"], arms("fp32"), range(2), runs=tmp_path)
    assert len(run_grid(made[:1], Runner(), log=quiet).ran) == 1
    assert [cell for cell, _ in run_grid(made, Broken(), log=quiet).failed] == made[1:]


def test_a_real_model_that_cannot_run_is_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = "from torch import nn\n\n\ndef make():\n    return nn.Sequential(nn.Flatten(), nn.Linear(65, 10))\n"
    (tmp_path / "mine.py").write_text(model)
    line = [sys.executable, "-m", "gradwire_lab.cli.main", "compare", "--model", "mine.py:make", "--specs", SPECS]
    done = subprocess.run([*line, "--seeds", "1", "--workers", "2"], capture_output=True, text=True, timeout=200)
    assert done.returncode == 1
    assert "gradwire compare: fp32, seed 0 failed before its first result: RuntimeError: mat1 and mat2" in done.stderr
    assert done.stderr.count("Traceback") == 1 and "no checkpoint" not in done.stderr
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["mine-fp32-0"]


def test_a_cell_of_another_question_is_refused(tmp_path: Path) -> None:
    made = grid(["digits"], arms("fp32"), range(1), ["train.epochs=1"], tmp_path)
    run_grid(made, Runner(), command="gradwire compare digits", log=quiet)
    assert load(made[0].folder).command == "gradwire compare digits"
    other = grid(["digits"], arms("fp32"), range(1), ["train.epochs=9"], tmp_path)
    with pytest.raises(ValueError, match=r"was made by .*train\.epochs=1.*--suffix") as refused:
        run_grid(other, Runner(), log=quiet)
    assert "train.epochs=1, now 9." in str(refused.value)
    assert "sync.spec" not in str(refused.value) and "train.seed" not in str(refused.value)
    other = grid(
        ["digits", "dgc"], arms("fp32"), range(1), ["train.epochs=1", "optimizer.lr=2"], tmp_path, name="digits"
    )
    with pytest.raises(ValueError, match=r"recipe=digits, now digits dgc; optimizer\.lr not set, now 2\. .*--suffix"):
        run_grid(other, Runner(), log=quiet)


class Refusing(Runner):
    """Refuses a cell before its first step, as `gradwire train` refuses data of the wrong shape."""

    def __call__(self, recipes: tuple[str, ...], overrides: tuple[str, ...], folder: Path) -> None:
        raise ValueError("images must be [n, channels, height, width]")


def test_a_cell_that_was_refused_leaves_its_folder_to_the_next(tmp_path: Path) -> None:
    """The user corrects a file or a setting, and gives the command again: the runs of all seeds stay one group."""
    arm = Arm("fp32")
    first = grid(["digits"], [arm], range(1), ["train.epochs=1"], tmp_path, files={arm: {"mine.py": "aaaa"}})
    with pytest.raises(ValueError, match="images must be"):
        run_grid(first, Refusing(), log=quiet)
    said: list[str] = []
    second = grid(["digits"], [arm], range(1), ["train.epochs=2"], tmp_path, files={arm: {"mine.py": "bbbb"}})
    assert [cell.folder for cell in second] == [cell.folder for cell in first]
    run_grid(second, Runner(), log=said.append)
    assert "starts" in said[0] and finished(second[0].folder)
    third = grid(["digits"], [arm], range(1), ["train.epochs=2"], tmp_path, files={arm: {"mine.py": "cccc"}})
    assert third[0].folder != second[0].folder  # that one was trained, and is kept


def test_differences_are_paired_with_the_first_spec(tmp_path: Path) -> None:
    made = grid(["digits"], arms(SPECS), range(3), runs=tmp_path)
    assert outcome(made) is None
    run_grid(made, Runner(), log=quiet)
    task = outcome(made)
    assert task is not None and [group.label for group in task.groups] == ["fp32", "topk(0.01)|sign"]
    assert task.difference(task.groups[0]) is None
    told = task.difference(task.groups[1])
    # In points -0.1, -0.2, +0.1: the mean is -0.2 / 3; squares about it add up to 0.14 / 3; t is 4.302653.
    assert told is not None and told.mean == pytest.approx(-0.2 / 3)
    assert told.half_width == pytest.approx(4.302653 * (0.14 / 3 / 2 / 3) ** 0.5, rel=1e-6)


def test_the_command_prints_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "TrainCommand", lambda *_, **__: Runner())
    done = CliRunner().invoke(app, ["digits", "--specs", SPECS, "--seeds", "3", "--runs", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "-0.07 [-0.45, +0.31]" in done.output
    told = json.loads((tmp_path / "digits-results.json").read_text())
    assert [spec["diverged"] for spec in told["specs"]] == [0, 0]
    assert told["specs"][1]["difference"]["mean"] == pytest.approx(-0.2 / 3)
    assert told["specs"][0]["values"] == pytest.approx({"0": 94.0, "1": 94.4, "2": 94.1})
    assert told["left"] == told["failed"] == 0
    assert "| topk(0.01)\\|sign | 4 | 3 | 94.10 +- 0.17" in (tmp_path / "digits-results.md").read_text()


MODEL = "import torch\n\n\ndef make():\n    return torch.nn.Linear(64, {width})\n"


def compared(*words: str) -> str:
    done = CliRunner().invoke(app, ["digits", "--seeds", "1", "--specs", "fp32", *words], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    return done.output


def test_a_changed_model_or_recipe_file_is_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runner = Runner()
    monkeypatch.setattr(command, "TrainCommand", lambda *_, **__: runner)
    (tmp_path / "mine.py").write_text("import layers\n" + MODEL.format(width=10))
    (tmp_path / "layers.py").write_text("import math")
    (tmp_path / "fast.toml").write_text("[train]\nepochs = 2\n")
    words = ["fast.toml", "--set", "model.name=mine.py:make"]
    compared(*words)
    assert "finished before" in compared(*words) and len(runner.calls) == 1
    for file, text in (("mine.py", "import layers\n" + MODEL.format(width=11)), ("layers.py", ""), ("fast.toml", "")):
        (tmp_path / file).write_text(text)
        assert "mine.py" in (printed := compared(*words)) and "finished before" not in printed, file
    assert len(runner.calls) == len(set(runner.calls)) == 4  # the earlier runs are kept
    assert "finished before" in (again := compared(*words)) and "differs from earlier runs" not in again
    assert len(list(tmp_path.glob("runs/*-results*.md"))) == 4
    kept = {path.stem.rpartition("-")[2] for path in tmp_path.glob("runs/*-results-*.md")}
    hashes = {name.split("-")[-2] for name in runner.calls[1:]}  # the first run's name has none
    assert len(kept & hashes) == 2  # the third is of the latest table, which has the plain name


@pytest.mark.parametrize(("option", "path"), [("--runs", "afile"), ("--runs", "afile/in"), ("--results", "afile/x.md")])
def test_a_place_that_cannot_be_written_to_is_refused_before_training(
    option: str, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Runner()
    monkeypatch.setattr(command, "TrainCommand", lambda *_, **__: runner)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "afile").write_text("")
    done = CliRunner().invoke(app, ["digits", "--seeds", "1", "--specs", "fp32", option, path], env={"COLUMNS": "200"})
    assert done.exit_code == 2 and f"{option} needs the folder afile" in done.output and "name another" in done.output
    assert runner.calls == []


def test_results_of_another_grid_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "TrainCommand", lambda *_, **__: Runner())
    for specs in (SPECS, SPECS, "fp32"):
        compared("--specs", specs, "--runs", str(tmp_path))
    kept, latest = sorted(tmp_path.glob("*.json"), key=lambda path: -len(path.name))
    assert latest.name == "digits-results.json" and len(list(tmp_path.glob("*.md"))) == 2
    assert [len(json.loads(path.read_text())["specs"]) for path in (kept, latest)] == [2, 1]


@pytest.mark.parametrize(
    ("words", "specs", "sentence"),
    [
        (["digits"], "fp32; tpok(0.1)", "did you mean topk?"),
        (["digits"], "fp32; fp32 @ train.seed=0 @ train.epoch=3", "did you mean 'epochs'?"),
        (["digits"], "fp32; fp32 @ train.epochs=18", "'fp32' and 'fp32 @ train.epochs=18' would be the same training"),
        (["digits", "ring8"], "sign; topk(0.1)", "workers that gossip compress by gossip.codec"),
        (["digits"], "dense; sparseloco(H=5)", '--specs "dense; dense @ local.spec=sparseloco(H=5)"'),
        (
            ["digits"],
            'int4; exchange=two_way; sparseloco(H=5, scales="bf16"); exchange=allgather',
            """exchange=two_way; dense @ local.spec=sparseloco(H=5, scales="bf16") @ local.exchange=allgather'""",
        ),
        (["dgc", "ramp5"], "fp32", "dgc ramp5 only adds to a recipe; name one before"),
    ],
)
def test_what_a_cell_would_refuse_is_refused_before_any_trains(
    tmp_path: Path, words: list[str], specs: str, sentence: str
) -> None:
    done = CliRunner().invoke(app, [*words, "--specs", specs, "--runs", str(tmp_path)])
    assert done.exit_code == 2 and sentence in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_form_that_a_refusal_of_local_steps_prints_is_taken() -> None:
    asked = arms("int4 @ sync.exchange=two_way; dense @ local.spec=sparseloco(H=5) @ local.exchange=allgather")
    command._refuse_local(asked)
    first, second = (resolve(["digits"], [f"sync.spec={arm.spec}", *arm.overrides]) for arm in asked)
    assert (first.sync.spec, first.sync.exchange, first.local.spec) == ("int4", "two_way", "")
    assert (second.sync.spec, second.local.spec, second.local.exchange) == ("dense", "sparseloco(H=5)", "allgather")


def test_the_runner_types_what_a_person_would(tmp_path: Path) -> None:
    line = TrainCommand(("--in-process", "2")).line(("digits",), ("train.epochs=1",), tmp_path)
    assert line[3:] == ["train", "digits", "--set", "train.epochs=1", "--folder", str(tmp_path), "--in-process", "2"]
    (tmp_path / "run.jsonl").touch()
    assert "--resume" in TrainCommand().line(("digits",), (), tmp_path)


def test_the_runner_stops_in_time_and_tells_failures_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def scripted(code: str) -> None:
        monkeypatch.setattr(TrainCommand, "line", lambda *_: [sys.executable, "-c", code])

    begun = time.monotonic()
    scripted("import time; time.sleep(60)")
    with pytest.raises(OutOfTime):
        TrainCommand(deadline=begun + 0.5)(("digits",), (), tmp_path)
    assert time.monotonic() - begun < 30
    scripted("raise SystemExit(2)")
    with pytest.raises(ValueError, match="refused"):
        TrainCommand()(("digits",), (), tmp_path)
    scripted("raise SystemExit(3)")
    with pytest.raises(RuntimeError, match="code 3"):
        TrainCommand()(("digits",), (), tmp_path)


def test_a_real_training_ends_in_a_table(tmp_path: Path) -> None:
    line = ["compare", "digits", "--specs", "topk(0.01)|sign", "--seeds", "1", "--set", "train.iterations=2"]
    line += ["--in-process", "2", "--runs", str(tmp_path)]
    done = CliRunner().invoke(whole, line)
    assert done.exit_code == 0, done.output
    assert finished(tmp_path / "digits-topk-0.01-sign-0")
    assert "2 simulated" in done.output
    again = CliRunner().invoke(whole, line)
    assert again.exit_code == 0 and "finished before" in again.output
