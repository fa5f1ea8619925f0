"""Closed handles: with which weights each rank goes on."""

from typing import Any

import pytest
import torch

import fixtures
import gradwire
from spawn import Answers, cases_fixture

H = 4
SPECS = {
    "plain": f"diloco(H={H})",
    "delay": f"diloco(H={H}, delay=1, alpha=0.0)",
    "delay and own share": f"diloco(H={H}, delay=3, alpha=0.5)",
    "own share": f"local_sgd(H={H}, alpha=0.5)",
    "fragments": f"streaming_diloco(H={H}, fragments=2)",
    "fragments at once": f"streaming_diloco(H={H}, fragments=2, delay=0, alpha=0.0)",
    "kept errors": f"sparseloco(H={H}, k=4, chunk=32, keep=1.0)",
}


def step(net: Any, optimizer: Any, rank: int, number: int) -> None:
    optimizer.zero_grad()
    fixtures.loss(net, rank, number).backward()
    optimizer.step()


def closed(rank: int, world: int, spec: str) -> list[bool]:
    """Whether replicas are equal after close(): at the end of a round, and inside one, where nothing waits."""
    return [_equal_after(rank, spec, steps) for steps in (2 * H, 2 * H + 2)]


def _equal_after(rank: int, spec: str, steps: int) -> bool:
    net = torch.nn.Sequential(torch.nn.BatchNorm1d(10), fixtures.model())
    optimizer = fixtures.sgd(net)
    outer = gradwire.local(net, optimizer, spec)
    for number in range(steps):
        step(net, optimizer, rank, number)
        outer()
    outer.close()
    ends, equal = outer.inside == 0, [fixtures.same_on_all_ranks(x) for x in net.state_dict().values()]
    own = fixtures.tensors(net)
    with outer.averaged():
        assert fixtures.same(own, fixtures.tensors(net)) is ends, "these are the outer weights"
    outer.close()
    assert fixtures.same(own, fixtures.tensors(net)), "a second call changes nothing"
    return all(equal)


answers = cases_fixture(closed, 2, SPECS)


@pytest.mark.parametrize("case", SPECS)
def test_replicas_that_are_closed_at_the_end_of_a_round_are_equal(case: str, answers: Answers) -> None:
    assert answers[case] == [[True, False]] * 2


def trained(spec: str, steps: int) -> tuple[Any, Any]:
    net = fixtures.model()
    optimizer = fixtures.sgd(net)
    outer = gradwire.local(net, optimizer, spec)
    for number in range(steps):
        step(net, optimizer, 0, number)
        outer()
    return net, outer


@pytest.mark.parametrize(("spec", "steps", "keep"), [("diloco(H=4)", 4, False), ("diloco(H=4, delay=1)", 4, True)])
def test_weights_that_were_loaded_stay(spec: str, steps: int, keep: bool) -> None:
    """Where the round has ended on the outer weights, and where the caller says so."""
    net, outer = trained(spec, steps)
    net.load_state_dict(fixtures.model(seed=3).state_dict())
    outer.close(keep_weights=keep)
    assert fixtures.same(fixtures.tensors(net), fixtures.tensors(fixtures.model(seed=3)))


def test_inside_of_averaged_the_end_is_refused_where_it_would_be_taken_back() -> None:
    _, outer = trained("diloco(H=4, delay=1)", 4)
    with outer.averaged(), pytest.raises(RuntimeError, match=r"outer\.close\(\) was called inside of averaged\(\)"):
        outer.close()
    outer.close()
    assert outer.fragments[0].pending_result is None


@pytest.mark.parametrize("end", ["closed", "replaced"])
def test_a_handle_that_has_ended_is_called_no_longer(end: str) -> None:
    """It made further rounds of a model whose gradients were averaged in every step, or that another handle had."""
    net = fixtures.model()
    optimizer = fixtures.sgd(net)
    outer = gradwire.local(net, optimizer, "local_sgd(H=2)")
    step(net, optimizer, 0, 0)
    outer()
    if end == "closed":
        outer.close()
    else:
        assert gradwire.local(net, optimizer, "local_sgd(H=2)").steps == 0
    with pytest.raises(RuntimeError, match="these local steps have ended"):
        outer()
    assert (outer.steps, outer.rounds) == (1, 0)
