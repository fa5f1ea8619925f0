"""Recipes whose workers take local steps: in one process or in several, resumed, planned."""

from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from gradwire_lab.cli.main import app
from gradwire_lab.train import run_modes
from gradwire_lab.train.display import summary
from gradwire_lab.train.recipe_files import load
from gradwire_lab.train.record import open_folder
from gradwire_lab.train.run_folder import read
from gradwire_lab.train.run_recipe import TrainJob, evaluate
from training_fixtures import recipe_of, saved, train

SPEC = "local.spec=sparseloco(H=3, k=4, chunk=64, start=2)"
NORMED = ("model.name=training_fixtures:Normed", "model.options={}", "local.passes=sequential", "local.bundle=none")


def test_processes_go_on_inside_a_round_where_simulated_workers_stopped_bit_for_bit(tmp_path: Path) -> None:
    """Five steps here, the rest in processes: the start has ended, and a round is open."""
    recipe, (here, there) = recipe_of("digits", SPEC, *NORMED), (tmp_path / "here", tmp_path / "there")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        final = train(recipe, 2, here)
        train(recipe_of("digits", SPEC, *NORMED, "train.iterations=4"), 2, there)
    finally:
        torch.set_num_threads(threads)
    open_folder(there, recipe)
    other = run_modes.train_spawned(TrainJob(recipe, there, resume=True), 2, lambda record: None)
    for rank in range(2):
        mine, theirs = saved(here, f"rank-{rank}.safetensors"), saved(there, f"rank-{rank}.safetensors")
        assert mine.keys() == theirs.keys()
        different = [key for key in mine if key != "loss" and not torch.equal(mine[key], theirs[key])]
        assert different == [], [(mine[key], theirs[key]) for key in different[:2]]
    for name in ("sent", "payload", "dense", "rounds", "step"):
        assert final[name] == other[name], name
    assert final["rounds"] == 2 and final["value"] == pytest.approx(other["value"], rel=1e-5)
    steps = [record for record in read(here) if record["event"] == "step"]
    assert {record["rounds"] for record in steps} >= {0, 1, 2}


def test_a_schedule_has_one_name_in_all_sessions_of_a_run(tmp_path: Path) -> None:
    """Reports group runs by it."""
    schedule = "local.spec=local_schedule({0: local_sgd(H=1), 2: local_sgd(H=2)})"
    for steps in (4, 6):
        train(recipe_of("digits", schedule, f"train.iterations={steps}"), 2, tmp_path, resume=steps > 4)
    first, second = [record for record in read(tmp_path) if record["event"] == "start"]
    assert first["spec"] == second["spec"] and "from step 2 H=2" in first["spec"]


def test_local_steps_learn_digits(tmp_path: Path) -> None:
    recipe = recipe_of(
        "digits", "local.spec=diloco(H=5)", "local.codec=int8", "train.epochs=8", "train.batch=80", "optimizer.lr=0.02"
    )
    final = train(recipe, 4, tmp_path)
    assert final["value"] > 0.8 and final["payload_ratio"] > 15
    console = Console(file=StringIO(), width=150)
    for since, words in ((final["since_round"], ""), (3, "the last 3 steps ended no round")):
        console.print(summary({**final, "since_round": since}))
        assert words in console.file.getvalue() and ("ended no round" in console.file.getvalue()) is bool(words)
    score = evaluate(tmp_path, load(tmp_path / "recipe.toml"), "last", "test", "cpu")
    assert score.value == pytest.approx(final["value"])  # of outer weights


@pytest.mark.parametrize("stop", [3, 6])
def test_rounds_that_change_go_on_where_they_were_stopped(stop: int, tmp_path: Path) -> None:
    """Two rounds of two steps, then two of three: each stop is inside a round."""
    spec = "local.spec=local_schedule({0: diloco(H=2), 3: diloco(H=3, rate=0.5)})"
    through = train(recipe_of("digits", spec, "train.iterations=10"), 2, tmp_path / "through")
    train(recipe_of("digits", spec, f"train.iterations={stop}"), 2, tmp_path / "broken")
    resumed = train(recipe_of("digits", spec, "train.iterations=10"), 2, tmp_path / "broken", resume=True)
    assert (
        through["since_round"] == 0
        and through["rounds"] == resumed["rounds"] == 4
        and through["payload"] == resumed["payload"]
    )
    for rank in range(2):
        mine, theirs = (saved(tmp_path / name, f"rank-{rank}.safetensors") for name in ("through", "broken"))
        assert [key for key in mine if key != "loss" and not torch.equal(mine[key], theirs[key])] == []
    methods = [record["method"] for record in read(tmp_path / "broken") if record["event"] == "start"]
    assert len(methods) == 2 and methods[0] == methods[1] and "from step 3 H=3" in methods[0]


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (("local.spec=topk(0.1)",), "topk"),
        (("local.spec=diloco(H=3)", "gossip.method=choco"), r"gossip\.H"),
        (("local.spec=diloco(H=3, start=2, first=None)",), "first="),
        (("local.spec=diloco(H=3)", "train.precision=fp16"), "bf16"),
        (("sync.spec=diloco(H=3)",), r"local\.spec"),
        (("local.spec=muloco(H=5)",), r"Muon, and recipes step by sgd or adamw; .*diloco\(H=5, momentum=0\.6\)"),
        (("local.spec=local_schedule({0: diloco(H=2), 9: muloco(H=5)})",), "Muon"),
    ],
)
def test_odd_recipes_are_refused(overrides: tuple[str, ...], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        recipe_of("digits", *overrides)


def test_a_plan_counts_rounds() -> None:
    done = CliRunner().invoke(app, ["plan", "digits", "--set", "local.spec=sparseloco(H=5)"])
    assert done.exit_code == 0 and "H=5" in done.output and "rounds" in done.output
    assert "that does not end" not in done.output
    spec = "local_schedule({0: diloco(H=2), 10: local_sgd(H=7)})"
    done = CliRunner().invoke(app, ["plan", "digits", "--set", f"local.spec={spec}", "--set", "train.iterations=20"])
    text = " ".join(done.output.split())
    assert "then 6 rounds" in text and "the last 3 steps are of a round that does not end" in text
    assert "outer weights with momentum 574 kB" in text
    assert "0 │ round of H=2 │ 287,016 │ 2.0 │" in text and "│ 10 │ round of H=7 │ 287,016 │ 7.0 │" in text


def test_a_plan_has_bytes_of_the_start_and_of_a_round() -> None:
    """A round is compared with float32 in each of its steps, as by `gradwire show`."""
    done = CliRunner().invoke(app, ["plan", "digits", "--set", "local.spec=sparseloco(H=5, start=100)"])
    text = " ".join(done.output.split())
    assert "bytes of one rank ┏" in text and "0 │ step of the start │ 38,396 │ 7.5 │ 57,594 │ 7.5 │" in text
    assert "100 │ round of H=5 │ <= 1,858 │ >= 772.4 │" in text
    assert "differences 287 kB, and errors from before the round 287 kB" in text
    short = CliRunner().invoke(
        app, ["plan", "digits", "--set", "local.spec=sparseloco(start=100)", "--set", "train.iterations=50"]
    )
    assert "step of the start" in short.output and "round of H" not in short.output


def test_a_plan_tells_what_a_billion_parameters_take() -> None:
    """On the meta device: 4 GB for a vector of float32."""
    words = ["plan", "pydoc-gpt", "--set", "model.options={width=2048, layers=20, heads=16}"]
    for spec, outer in (("sparseloco(H=30)", "outer weights"), ("diloco(H=30)", "outer weights with momentum")):
        done = CliRunner().invoke(app, [*words, "--set", f"local.spec={spec}"])
        assert done.exit_code == 0, done.output
        text = " ".join(done.output.split())
        assert f"{outer} {'4.03' if 'sparse' in spec else '8.06'} GB" in text, text
        assert ("errors 4.03 GB" in text) is ("sparse" in spec) and "differences 4.03 GB" in text
        assert ("errors from before the round 4.03 GB" in text) is ("sparse" in spec)


def test_gossip_takes_local_steps(tmp_path: Path) -> None:
    final = train(recipe_of("digits", "gossip.method=dpsgd", "gossip.H=5"), 3, tmp_path)
    once = train(recipe_of("digits", "gossip.method=dpsgd"), 3, tmp_path / "once")
    assert final["sent"] == pytest.approx(once["sent"] / 5)
