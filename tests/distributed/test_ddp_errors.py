"""An error while gradients are exchanged under DDP is raised by the user's own backward(), unchanged."""

from typing import Any

import pytest

import fixtures
import gradwire
from spawn import Answers, cases_fixture, run_ranks

OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "find_unused_parameters": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
}
FAILING = (0, 2)  # steps of rank 1


class UserError(Exception):
    pass


def fail(*_: object) -> None:
    raise UserError("detail; remedy")


def train(rank: int, world: int, options: dict[str, Any]) -> list[str]:
    """The error of every step."""
    outer = fixtures.ddp(fixtures.model(), **options)
    wire = gradwire.compress(outer, "topk(0.1)", bucket_mb=fixtures.BUCKET_MB)
    finish = wire.engine.finish
    errors = []
    for step in range(4):
        outer.zero_grad()
        wire.engine.finish = fail if rank == 1 and step in FAILING else finish
        errors.append(fixtures.error_text(lambda step=step: fixtures.loss(outer, rank, step).backward()))
    return errors


answers = cases_fixture(train, 2, OPTIONS)


@pytest.mark.parametrize("case", OPTIONS)
def test_an_error_keeps_its_type_and_its_message(case: str, answers: Answers):
    first, second = answers[case]
    assert first == [fixtures.NO_ERROR] * 4
    assert second == ["UserError: detail; remedy" if step in FAILING else fixtures.NO_ERROR for step in range(4)]


def fail_early(rank: int, world: int) -> tuple[str, str]:
    """An error before anything was sent, in the first of several buckets; and a second hook."""
    outer = fixtures.ddp(fixtures.model())
    wire = gradwire.compress(outer, "topk(0.1)", bucket_mb=fixtures.BUCKET_MB)
    wire.engine.bucket_rounds = fail
    early = fixtures.error_text(lambda: fixtures.loss(outer, rank, 0).backward())
    return early, fixtures.error_text(lambda: gradwire.compress(outer, "sign"))


def join(rank: int, world: int) -> tuple[str, int]:
    """Uneven batches: the second rank has none, so that it would take part in no backward pass."""
    outer, steps = fixtures.ddp(fixtures.model()), []
    gradwire.compress(outer, "topk(0.1)")

    def train() -> None:
        with outer.join():
            for step in range(2 - 2 * rank):
                fixtures.loss(outer, rank, step).backward()
                steps.append(step)

    return fixtures.error_text(train), len(steps)


def test_join_is_refused_on_all_ranks():
    for text, steps in run_ranks(join, 2):
        assert text.startswith("RuntimeError: ") and "join()" in text and "DistributedSampler" in text, text
        assert steps == 0


def test_an_error_of_a_launch_is_raised_and_a_second_hook_is_refused():
    for early, twice in run_ranks(fail_early, 2):
        assert early == "UserError: detail; remedy"
        assert twice.startswith("RuntimeError") and "hook" in twice and "set(" in twice
