"""Run folders, whole, broken off and resumed."""

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gradwire_lab.cli.main import app
from gradwire_lab.report.charts.figure import colors
from gradwire_lab.report.load import METRICS, find, finished, load
from gradwire_lab.report.run_groups import Task, front, tasks
from gradwire_lab.report.statistics import Estimate
from gradwire_lab.report.summary import cells, columns, headline
from run_folders import write_grid, write_run


def test_a_run_is_read_back(tmp_path: Path) -> None:
    run = load(write_run(tmp_path, "dgc(0.001)", seed=2, epochs=3, values=[0.5, 0.6, 0.7]))
    assert (run.spec, run.seed, run.world, run.stem) == ("dgc(0.001)", 2, 4, "digits-dgc-0.001")
    assert [run.value(record) for record in run.epochs] == pytest.approx([50, 60, 70])
    assert len(run.steps) == 60 and run.final is not None
    assert run.recipe["train"]["seed"] == 2
    assert run.command == "gradwire train digits --suffix 'dgc(0.001)'"


def test_a_resumed_log_counts_each_epoch_once_and_a_cut_line_not(tmp_path: Path) -> None:
    folder = write_run(tmp_path, epochs=2, values=[0.5, 0.6], ended=False)
    log = folder / "run.jsonl"
    again = json.loads(log.read_text().splitlines()[-1]) | {"value": 0.65}
    with log.open("a") as file:
        file.write(
            json.dumps({"event": "start", "spec": "fp32", "world": 4}) + "\n" + json.dumps(again) + '\n{"event": "st'
        )
    run = load(folder)
    assert [run.value(record) for record in run.epochs] == pytest.approx([50, 65])
    assert run.final is None and not finished(folder)
    assert run.last["value"] == 0.65


def test_a_log_that_is_damaged_within_is_refused(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    log = folder / "run.jsonl"
    whole = log.read_text()
    for damaged in ("{broken\n" + whole, "3\n" + whole, "broken"):
        log.write_text(damaged)
        with pytest.raises(ValueError, match=r"line 1 of .*run\.jsonl is not a record in JSON.*leave that run out"):
            load(folder)
    log.write_text(whole)
    for file in ("environment.json", "recipe.toml"):
        (folder / file).write_text("{")
        with pytest.raises(ValueError, match=f"{folder / file} is damaged"):
            load(folder)


def test_folders_are_found_at_any_depth_and_once(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a" / "b")
    assert find([tmp_path, folder, folder / "run.jsonl"]) == ([folder], [])
    empty = tmp_path / "empty"
    empty.mkdir()
    assert find([empty, folder]) == ([folder], [empty])
    done = CliRunner().invoke(app, ["report", str(empty)])
    assert done.exit_code == 2 and f"there is no run in {empty}" in done.output


def test_runs_are_grouped_by_everything_but_the_seed(tmp_path: Path) -> None:
    write_grid(tmp_path, seeds=2)
    write_run(tmp_path, "dgc(0.001)", settings={"sync.granularity": "model"}, name="digits-whole")
    (task,) = tasks([load(folder) for folder in find([tmp_path])[0]])
    assert task.baseline is not None and task.baseline.label == "fp32" and task.groups[0] is task.baseline
    labels = {group.label: len(group.runs) for group in task.groups}
    assert labels["dgc(0.001), granularity model"] == 1
    assert labels["dgc(0.001), granularity layer"] == 2
    assert labels["qsgd(4)"] == 2


def test_each_is_measured_against_the_dense_training_that_is_most_like_it(tmp_path: Path) -> None:
    for batch, own in ((256, 0.8), (128, 0.7)):
        settings = {"train.batch": batch}
        write_run(tmp_path, "fp32", settings=settings, name=f"dense-{batch}", epochs=1, values=[own])
        lost = [own - batch / 10_000]
        write_run(tmp_path, "qsgd(4)", settings=settings, name=f"qsgd-{batch}", epochs=1, values=lost)
    (task,) = tasks([load(folder) for folder in find([tmp_path])[0]])
    found = {group.label: task.difference(group) for group in task.groups if not group.dense}
    assert {label: round(value.mean, 2) for label, value in found.items() if value} == {
        "qsgd(4), batch 256": -2.56,
        "qsgd(4), batch 128": -1.28,
    }
    assert "against the dense baseline" in [column.title for column in columns(task)]
    assert len(set(colors(task).range)) == 4  # also the two that are dense


def test_tasks_of_other_models_stay_apart(tmp_path: Path) -> None:
    write_run(tmp_path)
    write_run(tmp_path, metric="perplexity", name="ptb", settings={"data.name": "ptb", "model.name": "lstm"})
    assert [task.name for task in tasks([load(folder) for folder in find([tmp_path])[0]])] == [
        "digits, cnn",
        "ptb, lstm",
    ]


def test_a_run_that_diverged_is_shown_as_such(tmp_path: Path) -> None:
    folder = write_run(tmp_path, epochs=1)
    log = folder / "run.jsonl"
    log.write_text(
        "".join(json.dumps(json.loads(line) | {"value": None}) + "\n" for line in log.read_text().splitlines())
    )
    run = load(folder)
    assert math.isnan(run.value(run.last))


@pytest.mark.parametrize("wrong", [{"train_loss": None}, {"skipped": 11}, {"diverged": "at step 3"}])
def test_what_diverged_is_no_result(tmp_path: Path, wrong: dict[str, object]) -> None:
    write_run(tmp_path, "fp32", epochs=1)
    write_run(tmp_path, "qsgd(4)", epochs=1, more={"skipped": 10})
    write_run(tmp_path, "terngrad", epochs=1, more=wrong)
    (task,) = tasks([load(folder) for folder in find([tmp_path])[0]])
    heads = [column.title for column in columns(task)]
    rows = {
        group.label: dict(zip(heads, (cell.text for cell in cells(task, group)), strict=True)) for group in task.groups
    }
    assert rows["terngrad"]["test accuracy (%)"] == rows["terngrad"]["against fp32"] == "diverged"
    assert rows["qsgd(4)"]["against fp32"][0] in "+-"
    assert rows["qsgd(4)"]["skipped steps"] == "10 of 20" and rows["fp32"]["skipped steps"] == "0"


def test_an_interval_ends_where_accuracies_do(tmp_path: Path) -> None:
    for seed, value in enumerate((0.955, 0.975)):
        write_run(tmp_path, "fp32", seed, epochs=1, values=[value])
    (task,) = tasks([load(folder) for folder in find([tmp_path])[0]])
    assert [cell.text for cell in cells(task, task.groups[0])][4] == "83.79 to 100.00 (cut)"


def test_what_else_differs_from_the_twin_is_told(tmp_path: Path) -> None:
    write_run(tmp_path, "fp32", epochs=8, settings={"train.batch": 64})
    write_run(
        tmp_path, "qsgd(4)", epochs=1, settings={"train.batch": 64, "train.save_every": 5, "sync.feedback": "none"}
    )
    (task,) = tasks([load(folder) for folder in find([tmp_path])[0]])
    assert [group.label for group in task.groups] == ["fp32", "qsgd(4), epochs 1"]


def test_a_run_of_several_sessions_lists_all(tmp_path: Path) -> None:
    folder = write_run(tmp_path, epochs=2, world=4)
    log = folder / "run.jsonl"
    first, *rest = map(json.loads, log.read_text().splitlines())
    sessions = [
        first | {"world": world, "step": step, "steps_per_epoch": 20, "command": ["gradwire", "train", *words]}
        for world, step, *words in (
            (2, 0, "digits", "--workers", "2"),
            (2, 10, "digits", "--workers", "2", "--resume"),
            (4, 20, "digits", "--resume", "--workers", "4"),
            (8, 40, "digits", "--resume", "--workers", "8"),  # of a run that had ended already
        )
    ]
    half, end = (
        next(i for i, r in enumerate(rest) if r["step"] == step and r["event"] == "epoch") for step in (20, 40)
    )
    lines = [
        *sessions[:2],
        *rest[: half + 1],
        sessions[2],
        *rest[half + 1 : end + 1],
        sessions[3],
        rest[-1] | {"ring": 7e6},
    ]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = load(folder)
    assert run.command == "gradwire train digits --workers 2 && gradwire train digits --workers 4 --resume"
    assert (run.ranks, run.world) == ("2, then 4", 4)
    assert run.wire_ratio == 2 * 7e6 / (run.last["sent"] + run.last["received"])
    log.write_text(log.read_text().replace('"command"', '"unknown"'))
    assert load(folder).command.endswith("  # 2 of 3 sessions noted none")


def test_the_headline_names_the_smallest_messages_without_a_loss(tmp_path: Path) -> None:
    for seed, noise in enumerate((0.0, 0.001, -0.001)):
        for spec, loss, more in (("fp32", 0.0, 8e6), ("int8", noise / 2, 2e6), ("sign", 0.2 + noise / 2, 1e5)):
            value = 0.9 + noise - loss
            write_run(tmp_path / "a", spec, seed, epochs=1, values=[value], more={"sent": more})
            if spec != "int8":
                write_run(tmp_path / "b", spec, seed, epochs=1, values=[value], more={"sent": more})
    (task,), (worse,) = (tasks([load(folder) for folder in (tmp_path / name).iterdir()]) for name in "ab")
    assert headline(task).startswith("int8: no significant loss over 3 seeds (") and headline(task).endswith(
        "4 times fewer bytes."
    )
    assert headline(worse) == "Every spec loses against fp32."
    (single,) = tasks([load(tmp_path / "a" / "digits-fp32-0"), load(tmp_path / "a" / "digits-int8-0")])
    assert headline(single) == ""


def write_specs(folder: Path, specs: dict[str, tuple[float, float]], seeds: int = 3) -> Task:
    """Runs of specs whose metric differs from fp32's by the same amount with every seed, and what they send."""
    for seed in range(seeds):
        for spec, (loss, sent) in {"fp32": (0.0, 8e6), **specs}.items():
            more = {"sent": sent} | ({"diverged": 1} if math.isnan(loss) else {})
            value = 0.1 if math.isnan(loss) else 0.9 + 0.01 * seed - loss
            write_run(folder, spec, seed, epochs=1, values=[value], more=more)
    (task,) = tasks([load(one) for one in sorted(folder.iterdir())])
    return task


def test_a_spec_that_equals_the_baseline_with_every_seed_has_the_headline(tmp_path: Path) -> None:
    task = write_specs(tmp_path, {"int8": (0.0, 2e6), "sign": (0.2, 1e5)})
    assert headline(task) == "int8: equal to the baseline with each of 3 seeds, 4 times fewer bytes."


def test_a_constant_loss_is_a_loss_and_a_constant_gain_is_none(tmp_path: Path) -> None:
    assert headline(write_specs(tmp_path / "a", {"sign": (0.2, 1e5)})) == "Every spec loses against fp32."
    better = headline(write_specs(tmp_path / "b", {"sign": (-0.01, 1e6)}))
    assert better == "sign: better by the same amount with each of 3 seeds (+1.00), 8 times fewer bytes."


def test_of_equal_messages_the_headline_names_the_best_or_all(tmp_path: Path) -> None:
    task = write_specs(tmp_path / "a", {"sign": (0.0, 1e6), "int8": (0.0, 1e6), "qsgd(4)": (0.0, 2e6)})
    assert headline(task) == "int8 and sign: equal to the baseline with each of 3 seeds, 8 times fewer bytes."
    task = write_specs(tmp_path / "b", {"int8": (0.0, 1e6), "sign": (-0.01, 1e6)})
    assert headline(task).startswith("sign: better by the same amount")


def test_an_interval_that_is_far_wider_than_others_shows_no_loss_nor_its_absence(tmp_path: Path) -> None:
    losses = {"fp32": (0, 0, 0), "int8": (0.001, -0.001, 0.0), "sign": (0.3, 0.0, 0.02)}
    for seed in range(3):
        for spec, sent in (("fp32", 8e6), ("int8", 2e6), ("sign", 1e5)):
            value = 0.9 + 0.002 * seed - losses[spec][seed]
            write_run(tmp_path, spec, seed, epochs=1, values=[value], more={"sent": sent})
    (task,) = tasks([load(folder) for folder in tmp_path.iterdir()])
    first, second = headline(task).split(" int8: ")
    assert first.startswith("sign: too few seeds to tell (-10.67 [") and second.startswith("no significant loss over 3")
    (alone,) = tasks([load(folder) for folder in tmp_path.iterdir() if "int8" not in folder.name])
    assert headline(alone) == first


def test_a_wide_interval_is_not_taken_beside_a_spec_that_lost_nothing(tmp_path: Path) -> None:
    """The seeds of the baseline differ as much, which says nothing about differences seed by seed."""
    losses = {"fp32": (0, 0, 0), "int8": (0, 0, 0), "sign": (-0.002, 0.005, 0.017)}
    for seed in range(3):
        for spec, sent in (("fp32", 8e6), ("int8", 2e6), ("sign", 1e5)):
            value = 0.79 + 0.009 * (seed - 1) - losses[spec][seed]
            write_run(tmp_path, spec, seed, epochs=1, values=[value], more={"sent": sent})
    (task,) = tasks([load(folder) for folder in tmp_path.iterdir()])
    assert headline(task).startswith("sign: too few seeds to tell (-0.67 [")
    assert headline(task).endswith(" int8: equal to the baseline with each of 3 seeds, 4 times fewer bytes.")


def test_a_spec_that_sends_more_than_the_baseline_has_no_headline(tmp_path: Path) -> None:
    task = write_specs(tmp_path / "a", {"topk(0.5)|bitmap": (0.0, 2e7), "sign": (0.2, 1e5)})
    assert headline(task) == "Every spec that sends fewer bytes loses against fp32."
    assert headline(write_specs(tmp_path / "b", {"topk(0.5)|bitmap": (0.0, 2e7)})) == ""


def test_what_diverged_has_lost(tmp_path: Path) -> None:
    assert headline(write_specs(tmp_path, {"sign": (math.nan, 1e5)})) == "Every spec loses against fp32."


def test_two_seeds_make_no_headline(tmp_path: Path) -> None:
    """The interval of two seeds spans 25 of their standard errors, so it holds zero whatever was lost."""
    for seed, loss in enumerate((0.05, 0.09)):
        write_run(tmp_path, "fp32", seed, epochs=1, values=[0.9], more={"sent": 8e6})
        write_run(tmp_path, "sign", seed, epochs=1, values=[0.9 - loss], more={"sent": 1e5})
    (task,) = tasks([load(folder) for folder in tmp_path.iterdir()])
    assert headline(task) == ""


def spot(cost: float, mean: float, reach: float | None = 0.4) -> tuple[float, Estimate]:
    ends = (None, None) if reach is None else (mean - reach, mean + reach)
    return cost, Estimate(3, mean, 0.1, *ends)


def test_the_front_is_what_nobody_beats() -> None:
    points = [spot(5.0, 90.0), spot(1.0, 80.0), spot(2.0, 79.0), spot(5.0, 91.0), spot(9.0, 91.0)]
    assert front(points, METRICS["top1"]) == [1, 3]
    assert front(points, METRICS["perplexity"]) == [1, 2]


def test_the_front_has_no_two_points_whose_intervals_overlap() -> None:
    points = [spot(1.0, 80.0), spot(2.0, 80.7), spot(3.0, 80.9), spot(0.5, 99.0, None), spot(4.0, 82.0, 3.0)]
    assert front(points, METRICS["top1"]) == [0, 2]
    assert front([spot(1.0, 80.0, None), spot(2.0, 90.0, None)], METRICS["top1"]) == []


def test_the_wire_ratio_counts_both_ways(tmp_path: Path) -> None:
    run = load(write_run(tmp_path))
    sent, received, dense = run.last["sent"], run.last["received"], run.last["dense"]
    assert run.wire_ratio == pytest.approx(2 * (2 * 3 / 4 * dense) / (sent + received))
    assert load(write_run(tmp_path, world=1, name="alone")).wire_ratio == 0
