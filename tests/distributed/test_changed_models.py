"""A parameter that begins to train after a wire was attached would drift apart: it is named, on all ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fixtures
import gradwire
from spawn import Answers, cases_fixture


def unfreeze(net: nn.Sequential) -> None:
    net[2].weight.requires_grad_(True)


def add(net: nn.Sequential) -> None:
    net.append(nn.Linear(5, 3))


def replace(net: nn.Sequential) -> None:
    net[2].bias = nn.Parameter(torch.zeros(12))


def freeze(net: nn.Sequential) -> None:
    net[4].weight.requires_grad_(False)


CHANGES: dict[str, tuple[Callable[[nn.Sequential], None], tuple[str, ...]]] = {
    "unfrozen": (unfreeze, ("RuntimeError", "'2.weight'")),
    "added": (add, ("RuntimeError", "'5.weight'")),
    "replaced": (replace, ("RuntimeError", "'2.bias'")),
    "frozen": (freeze, (fixtures.NO_ERROR,)),
}
ENTRY_POINTS = ("plain", "hook", "optimizer", "lockstep")
CASES = {f"{what}, {entry}": (what, entry) for what in CHANGES for entry in ENTRY_POINTS}


def attach(entry: str, net: nn.Sequential) -> tuple[Any, Callable[[], object]]:
    """What to run forward, and what to call after backward."""
    if entry == "hook":
        outer = fixtures.ddp(net, find_unused_parameters=True)
        wire = gradwire.compress(outer, "topk(0.1)")
        return outer, lambda: wire.skipped
    if entry == "optimizer":
        return net, fixtures.wrap_optimizer(net, spec="topk(0.1)").step
    if entry == "lockstep":
        return net, gradwire.lockstep([net], "topk(0.1)")
    return net, gradwire.compress(net, "topk(0.1)")


def change(rank: int, world: int, case: tuple[str, str]) -> str:
    what, entry = case
    net = fixtures.model()
    net[2].weight.requires_grad_(False)
    outer, sync = attach(entry, net)
    fixtures.loss(outer, rank, 0).backward()
    sync()
    CHANGES[what][0](net)

    def step() -> None:
        fixtures.loss(outer, rank, 1).backward()
        if entry == "optimizer" and what != "unfrozen":  # it is the optimizer that the change must reach
            sync.__self__.param_groups[0]["params"] = list(net.parameters())
        sync()

    return fixtures.error_text(step)


changes = cases_fixture(change, 2, CASES)


@pytest.mark.parametrize("case", CASES)
def test_a_parameter_that_comes_after_the_wire_is_named(case: str, changes: Answers):
    what, entry = CASES[case]
    words = CHANGES[what][1]
    if entry == "optimizer" and what in ("added", "replaced"):  # an optimizer knows no new names
        words = ("ValueError", {"added": "(3, 5)", "replaced": "(12,)"}[what])
    fixtures.check_message([(text, words) for text in changes[case]])
