"""Saved states with numbers that no run writes: refused by name. They ended in tracebacks, some of them steps later."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import fixtures
import gradwire
from gossip_fixtures import replicas

ODD: dict[str, Tensor | None] = {
    "missing": None,
    "below": torch.tensor(-(2**63)),
    "huge": torch.tensor(2**63 - 1),
    "a fraction": torch.tensor(1.5),
    "no number": torch.tensor(float("nan")),
    "two": torch.tensor([1, 2]),
    "none": torch.zeros(0, dtype=torch.int64),
}


@cache
def handles() -> dict[str, Any]:
    """For all tests: a state that is refused changes nothing."""
    net = fixtures.model()
    return {
        "compress": gradwire.compress(net, "topk(0.1)"),
        "local": gradwire.local(inner := fixtures.model(), fixtures.sgd(inner), "local_sgd(H=2)"),
    }


NUMBERS = ("format", "rank", "seed", "skipped", "step", "world")
CASES = [(name, what) for name in NUMBERS for what in ODD if (name, what) != ("seed", "below")]  # which is a seed


@pytest.mark.parametrize(("name", "what"), CASES)
@pytest.mark.parametrize("entry", ["compress", "local"])
def test_a_state_with_an_odd_number_is_refused_by_name(entry: str, name: str, what: str) -> None:
    handle = handles()[entry]
    state = {key: x for key, x in handle.state_dict().items() if key != f"gradwire/{name}"}
    if (odd := ODD[what]) is not None:
        state[f"gradwire/{name}"] = odd
    with pytest.raises(ValueError, match=f"gradwire/{name} of the state is"):
        handle.load_state_dict(state)


@pytest.mark.parametrize("name", ["number", "step"])
def test_a_state_of_gossip_with_an_odd_number_is_refused_by_name(name: str) -> None:
    net = gradwire.gossip_lockstep(replicas(2), "choco(ring)", "sign")
    states = net.state_dict()
    for odd in (x for x in ODD.values() if x is not None):
        states[0][f"gradwire/{name}"] = odd
        with pytest.raises(ValueError, match=f"gradwire/{name} of the state is"):
            net.load_state_dict(states)
