"""A start that does not suit the training is told, by a plan and by the training, as trainers' callbacks do."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from gradwire_lab.cli.main import app
from gradwire_lab.train.start_check import check_start
from training_fixtures import DIGITS, recipe_of

ADAMW = ("optimizer.name=adamw", "optimizer.lr=0.001")


def told(command: str, *settings: str) -> str:
    words = [word for setting in (*DIGITS, *settings) for word in ("--set", setting)]
    done = CliRunner().invoke(app, [command, "digits", *words])
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


@pytest.mark.parametrize(
    ("settings", "warning"),
    [
        (
            ("train.iterations=360", "sync.spec=onebit_adam(start=1000)", *ADAMW),
            "the start of sync.spec takes 1,000 of 360 steps, so that the training never leaves it; write "
            "start=100 into sync.spec: 15 % of the training, but no fewer than 100 steps",
        ),
        (
            ("train.iterations=60", "sync.rules=[{name='*.weight', spec='zero_one_adam(start=100)'}]", *ADAMW),
            "the start of sync.rules takes 100 of 60 steps, so that the training never leaves it; a start "
            "should be 15 % of the training, but no fewer than 100 steps: train for longer, or take int4",
        ),
        (
            ("train.iterations=5000", "sync.spec=onebit_adam", *ADAMW),
            "the start of sync.spec takes 256 of 5,000 steps, which is 5.1 %; with onebit_adam, one of 5 % and less "
            "cost 3 to 5 % of the loss, and one of 10 % up to 2 %; write start=750 into sync.spec: 15 %",
        ),
        (
            ("train.iterations=40", "local.spec=sparseloco(H=5, start=40)"),
            "the start of local.spec takes 40 of 40 steps, so that the training never leaves it; write "
            "start=6 into local.spec: 15 % of the training",
        ),
    ],
)
def test_a_plan_warns(settings: tuple[str, ...], warning: str) -> None:
    assert warning in told("plan", *settings)


@pytest.mark.parametrize("spec", ["sync.spec=onebit_adam(start=9)", "local.spec=sparseloco(H=2, start=9)"])
def test_a_training_that_leaves_its_start_is_not_warned_of(spec: str) -> None:
    recipe = recipe_of("digits", spec, *ADAMW)
    assert check_start(recipe, 9) and not check_start(recipe, 10)


@pytest.mark.parametrize("spec", ["sync.spec=int4", "gossip.method=choco", "local.spec=diloco(H=2)"])
def test_without_a_start_there_is_nothing_to_warn_of(spec: str) -> None:
    assert not check_start(recipe_of("digits", spec), 1)


@pytest.mark.parametrize("spec", ["sync.spec=onebit_adam(start=9)", "local.spec=sparseloco(H=2, start=9)"])
def test_a_training_warns(spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = told("train", spec, *ADAMW, "train.iterations=2", "train.workers=1")
    assert f"the start of {spec.partition('=')[0]} takes 9 of 2 steps" in said
