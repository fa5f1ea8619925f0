"""A schedule of rounds: other rounds from given steps on."""

from typing import Any

import pytest
import torch

import fixtures
import gradwire
from gradwire.local import LocalMethod, local_method
from local_fixtures import local_replicas, train

SHORT, LONG = "sparseloco(H=1, k=4, chunk=32, keep=1.0)", "sparseloco(H=3, k=4, chunk=32, rate=0.5)"
SPEC = f"local_schedule({{0: {SHORT}, 4: {LONG}}})"
WORLD = 3


def parse(spec: str) -> LocalMethod:
    made: Any = gradwire.parse(spec)
    assert isinstance(made, LocalMethod)
    return made


def outer_of(outer: Any) -> list[dict[str, torch.Tensor]]:
    return [{name: x.detach().clone() for name, x in rank.outer.weights.items()} for rank in outer.ranks]


def test_rounds_change_as_when_the_handle_is_set() -> None:
    nets, optimizers, scheduled = local_replicas(SPEC, WORLD, bundle=None)
    train(nets, optimizers, scheduled, range(10))
    nets, optimizers, by_hand = local_replicas(SHORT, WORLD, bundle=None)
    train(nets, optimizers, by_hand, range(4))
    for rank in by_hand.ranks:
        rank.schedule = rank.method = parse(LONG)
        rank.outer.configure(rank.method)
    train(nets, optimizers, by_hand, range(4, 10))
    for mine, theirs in zip(outer_of(scheduled), outer_of(by_hand), strict=True):
        assert fixtures.same(mine, theirs)


def test_a_round_that_has_begun_ends_first() -> None:
    nets, optimizers, outer = local_replicas("local_schedule({0: local_sgd(H=3), 4: local_sgd(H=2)})", WORLD)
    lengths = []
    for step in range(10):
        train(nets, optimizers, outer, range(step, step + 1))
        lengths.append((outer.ranks[0].method.H, outer.ranks[0].inside))
    assert lengths == [(3, 1), (3, 2), (3, 0), (3, 1), (3, 2), (3, 0), (2, 1), (2, 0), (2, 1), (2, 0)]


def test_another_codec_lets_a_round_that_has_begun_end() -> None:
    spec = "local_schedule({0: local_sgd(H=3), 4: local_sgd(H=2, rate=0.5)})"
    nets, optimizers, outer = local_replicas(spec, WORLD)
    train(nets, optimizers, outer, range(4))
    for rank in outer.ranks:
        rank.set("int8")
    found = []
    for step in range(4, 8):
        train(nets, optimizers, outer, range(step, step + 1))
        rank = outer.ranks[0]
        found.append((rank.method.H, rank.inside, rank.optimizer.param_groups[0]["lr"]))
    assert found == [(3, 2, 1.0), (3, 0, 1.0), (2, 1, 0.5), (2, 0, 0.5)]


@pytest.mark.parametrize(
    ("steps", "expected"), [(0, (0, 0)), (2, (0, 0)), (6, (2, 6)), (7, (2, 6)), (8, (3, 8)), (11, (4, 10))]
)
def test_rounds_within_counts_whole_rounds(steps: int, expected: tuple[int, int]) -> None:
    assert parse("local_schedule({0: local_sgd(H=3), 4: local_sgd(H=2)})").rounds_within(steps) == expected


def test_the_start_comes_before_the_schedule() -> None:
    spec = "local_schedule({0: diloco(H=2, start=3), 6: diloco(H=4)})"
    nets, optimizers, outer = local_replicas(spec, WORLD)
    found = []
    for step in range(11):
        found.append((outer.ranks[0].starting, outer.ranks[0].method.H))
        train(nets, optimizers, outer, range(step, step + 1))
    assert [starting for starting, _ in found] == [True] * 3 + [False] * 8
    assert parse(spec).rounds_within(11) == (3, 11)
    assert outer.ranks[0].report().rounds.steps == 3


@pytest.mark.parametrize(("saved", "inside"), [(3, 0), (4, 0), (5, 1), (8, 1)])
def test_a_saved_state_continues_inside_any_round(saved: int, inside: int) -> None:
    nets, optimizers, outer = local_replicas(SPEC, WORLD, bundle=None)
    train(nets, optimizers, outer, range(saved))
    assert outer.ranks[0].inside == inside
    states = [rank.state_dict() for rank in outer.ranks]
    inner = [optimizer.state_dict() for optimizer in optimizers]
    train(nets, optimizers, outer, range(saved, 11))
    others, fresh, again = local_replicas(SPEC, WORLD, bundle=None)
    for rank, state, optimizer, own in zip(again.ranks, states, fresh, inner, strict=True):
        rank.load_state_dict(state)
        optimizer.load_state_dict(own)
    train(others, fresh, again, range(saved, 11))
    for mine, theirs in zip(outer_of(again), outer_of(outer), strict=True):
        assert fixtures.same(mine, theirs)
    assert again.ranks[0].method == outer.ranks[0].method


def test_an_earlier_state_brings_the_earlier_rounds_back() -> None:
    nets, optimizers, outer = local_replicas(SPEC, WORLD, bundle=None)
    train(nets, optimizers, outer, range(2))
    states = [rank.state_dict() for rank in outer.ranks]
    train(nets, optimizers, outer, range(2, 8))
    assert outer.ranks[0].method.H == 3
    for rank, state in zip(outer.ranks, states, strict=True):
        rank.load_state_dict(state)
    assert outer.ranks[0].method.H == 1


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ("local_schedule({1: local_sgd(H=2)})", "step 0"),
        ("local_schedule(int4)", "step 0"),
        ("local_schedule({0: local_sgd(H=2), 4: local_sgd(H=3), 3: local_sgd(H=4)})", "[4, 3]"),
        ("local_schedule({0: diloco(H=2, start=5), 4: diloco(H=3)})", "start=5"),
        ("local_schedule({0: local_sgd(H=2), 4: sparseloco(H=3)})", "message"),
        ("local_schedule({0: diloco(H=2), 4: diloco(H=3, delay=1)})", "delay=1"),
        ("local_schedule({0: diloco(H=2), 4: diloco(H=3, start=2)})", "start"),
    ],
)
def test_schedules_that_make_no_sense_are_refused(spec: str, named: str) -> None:
    with pytest.raises(ValueError) as refused:
        gradwire.parse(spec)
    assert named in str(refused.value)


def test_a_codec_that_is_set_between_rounds_leaves_the_next_rate_alone() -> None:
    nets, optimizers, outer = local_replicas("local_schedule({0: local_sgd(H=2), 4: local_sgd(H=2, rate=0.5)})", 2)
    train(nets, optimizers, outer, range(4))
    for rank in outer.ranks:
        rank.set("int8")
    train(nets, optimizers, outer, range(4, 6))
    assert outer.ranks[0].optimizer.param_groups[0]["lr"] == 0.5


def test_rounds_of_the_same_rate_leave_that_of_a_scheduler_alone() -> None:
    nets, optimizers, outer = local_replicas("local_schedule({0: diloco(H=1), 4: diloco(H=3)})", 1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(outer.ranks[0].optimizer, 0.5)
    train(nets, optimizers, outer, range(3))
    scheduler.step()
    train(nets, optimizers, outer, range(3, 7))
    assert outer.ranks[0].method.H == 3
    assert outer.ranks[0].optimizer.param_groups[0]["lr"] == pytest.approx(0.35)


def test_an_optimizer_of_ones_own_keeps_its_rate() -> None:
    own = lambda weights: torch.optim.SGD(weights, lr=0.1)  # noqa: E731
    with pytest.raises(ValueError, match="outer= makes an optimizer"):
        local_replicas("local_schedule({0: local_sgd(H=1), 4: local_sgd(H=3, rate=0.5)})", 1, outer=own)
    nets, optimizers, outer = local_replicas("local_schedule({0: local_sgd(H=1), 4: local_sgd(H=3)})", 1, outer=own)
    train(nets, optimizers, outer, range(7))
    assert outer.ranks[0].method.H == 3 and outer.ranks[0].optimizer.param_groups[0]["lr"] == 0.1
    with pytest.raises(ValueError, match="outer= makes an optimizer"):
        outer.ranks[0].set("local_schedule({0: local_sgd(H=1), 4: local_sgd(H=3, rate=0.5)})")


def test_the_text_names_all_rounds() -> None:
    made, again = parse(SPEC), parse(SPEC)
    text = str(made)
    assert text.startswith("H=1") and "; from step 4 H=3" in text
    assert again is not made and again == made and hash(again) == hash(made)


def test_another_codec_keeps_the_schedule() -> None:
    chosen = local_method(SPEC.replace(", keep=1.0", ""), "int8")
    assert chosen.after(4).H == 3 and chosen.after(4).message == chosen.message


@pytest.mark.parametrize("change", ["set", "off"])
@pytest.mark.parametrize("steps", [3, 5])
def test_another_message_leaves_the_schedule_and_errors_alone(change: str, steps: int) -> None:
    nets, optimizers, outer = local_replicas(SPEC, WORLD, bundle=None)
    train(nets, optimizers, outer, range(steps))
    before = [fixtures.memories(rank.wire) for rank in outer.ranks]
    for rank in outer.ranks:
        rank.off() if change == "off" else rank.set("topk(0.1)")
    assert all(fixtures.same(fixtures.memories(rank.wire), x) for rank, x in zip(outer.ranks, before, strict=True))
    lengths = []
    for step in range(steps, 10):
        train(nets, optimizers, outer, range(step, step + 1))
        lengths.append((outer.ranks[0].method.H, outer.ranks[0].inside))
    assert lengths == [(1, 0), (1, 0), (1, 0), (1, 0), (3, 1), (3, 2), (3, 0), (3, 1), (3, 2), (3, 0)][steps:]
    assert outer.ranks[0].optimizer.param_groups[0]["lr"] == 0.5
    states = outer_of(outer)
    assert all(fixtures.same(one, states[0]) for one in states)


def test_another_schedule_counts_from_the_first_step_of_the_training() -> None:
    nets, optimizers, outer = local_replicas("diloco(H=2)", WORLD)
    train(nets, optimizers, outer, range(4))
    for rank in outer.ranks:
        rank.set("local_schedule({0: diloco(H=2), 3: diloco(H=3), 9: diloco(H=1)})")
    found = []
    for step in range(4, 12):
        train(nets, optimizers, outer, range(step, step + 1))
        found.append((outer.ranks[0].method.H, outer.ranks[0].inside))
    assert found == [(3, 1), (3, 2), (3, 0), (3, 1), (3, 2), (3, 0), (1, 0), (1, 0)]
