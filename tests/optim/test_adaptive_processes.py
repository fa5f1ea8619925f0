"""Methods that compress AdamW's momentum train alike in real processes, under DDP, by an optimizer, and in lockstep."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import fixtures
import gradwire
from spawn import Answers, cases_fixture

WORLD, STEPS = 2, 8
SPECS = (
    "onebit_adam(start=3, per=16)",
    "dgc_adam(0.1, start=3)",
    "zero_one_adam(start=4, per=16, alone=2, refresh=2)",
)
ENTRY_POINTS = ("loop", "ddp", "optimizer")


def make(net: torch.nn.Module) -> gradwire.AdamW:
    return gradwire.AdamW(net.parameters(), 0.01, weight_decay=0.1)


def weights(net: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def train(rank: int, world: int, case: tuple[str, str]) -> dict[str, Tensor]:
    spec, entry_point = case
    net, wire = fixtures.model(), None
    model, optimizer = DistributedDataParallel(net) if entry_point == "ddp" else net, make(net)
    if entry_point == "optimizer":
        stepping: Any = gradwire.DistributedOptimizer(optimizer, net.named_parameters(), spec)
    else:
        stepping, wire = optimizer, gradwire.compress(model, spec, optimizer=optimizer)
    for step in range(STEPS):
        stepping.zero_grad()
        fixtures.loss(model, rank, step).backward()
        if entry_point == "loop":
            wire()
        stepping.step()
    return weights(net)


def in_lockstep(spec: str) -> dict[str, Tensor]:
    nets = [fixtures.model() for _ in range(WORLD)]
    optimizers = [make(net) for net in nets]
    workers = gradwire.lockstep(nets, spec, optimizers=optimizers)
    for step in range(STEPS):
        for rank, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            optimizer.zero_grad()
            fixtures.loss(net, rank, step).backward()
        workers()
        for optimizer in optimizers:
            optimizer.step()
    return weights(nets[0])


CASES = {f"{spec} {entry_point}": (spec, entry_point) for spec in SPECS for entry_point in ENTRY_POINTS}
answers = cases_fixture(train, WORLD, CASES)


@pytest.mark.parametrize("case", CASES)
def test_every_entry_point_trains_as_lockstep_does(answers: Answers, case: str) -> None:
    ranks, expected = answers[case], in_lockstep(CASES[case][0])
    for name, x in expected.items():
        assert torch.equal(ranks[0][name], ranks[1][name])
        torch.testing.assert_close(ranks[0][name], x, rtol=1e-5, atol=1e-6)
