"""Outer weights shown for evaluation: states that are saved meanwhile, and calls that are refused."""

from typing import Any

import pytest

import fixtures
from local_fixtures import local_replicas, train

SPECS = ["diloco(H=4)", "diloco(H=4, delay=3, alpha=0.5)", "sparseloco(H=4, k=4, chunk=32, keep=1.0)"]


def in_round(spec: str, steps: int = 6) -> tuple[Any, Any]:
    nets, optimizers, outer = local_replicas(spec, 2)
    train(nets, optimizers, outer, range(steps))
    return nets[0], outer.ranks[0]


@pytest.mark.parametrize("spec", SPECS)
def test_a_state_that_is_saved_inside_is_that_of_training(spec: str) -> None:
    _, rank = in_round(spec)
    expected = rank.state_dict()
    with rank.averaged():
        assert fixtures.same(rank.state_dict(), expected)
    assert fixtures.same(rank.state_dict(), expected)


def test_inside_of_itself_it_changes_nothing() -> None:
    net, rank = in_round("diloco(H=4)")
    own = fixtures.tensors(net)
    with rank.averaged():
        shown = fixtures.tensors(net)
        with rank.averaged():
            assert fixtures.same(fixtures.tensors(net), shown)
        assert fixtures.same(fixtures.tensors(net), shown)
        with pytest.raises(RuntimeError, match=r"averaged\(\)"):
            rank()
    assert fixtures.same(fixtures.tensors(net), own)


def test_own_weights_come_back_after_an_error() -> None:
    net, rank = in_round("diloco(H=4)")
    own = fixtures.tensors(net)
    with pytest.raises(ZeroDivisionError), rank.averaged():
        raise ZeroDivisionError
    assert fixtures.same(fixtures.tensors(net), own)


def test_what_changes_own_weights_is_refused_inside() -> None:
    _, rank = in_round("diloco(H=4, delay=3)")
    state = rank.state_dict()
    with rank.averaged():
        with pytest.raises(RuntimeError, match=r"outer\.set\(\) was called inside of averaged\(\)"):
            rank.set("int4")
        with pytest.raises(RuntimeError, match=r"outer\.load_state_dict\(\) was called inside of averaged\(\)"):
            rank.load_state_dict(state)


def test_replicas_of_one_process_show_theirs_and_have_one_report() -> None:
    nets, optimizers, outer = local_replicas("diloco(H=2, start=1)", 2)
    assert outer.starting
    train(nets, optimizers, outer, range(4))
    own = [fixtures.tensors(net) for net in nets]
    with outer.averaged():
        shown = [fixtures.tensors(net) for net in nets]
    assert fixtures.same(*shown) and not fixtures.same(shown[0], own[0])
    assert all(fixtures.same(fixtures.tensors(net), before) for net, before in zip(nets, own, strict=True))
    assert not outer.starting and outer.report().start_steps == 1 and "step 4, 1 of 2 in the round" in str(outer)
