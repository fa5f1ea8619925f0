"""DDP's hook without a thread and without a look, as on a GPU with NCCL, computes what it computes with both."""

from typing import Any

import torch
from torch import Tensor

import fixtures
import gradwire
from gradwire.integrations.wire import Wire
from spawn import run_ranks

SPECS: list[dict[str, Any]] = [
    {"spec": "dgc(0.1)", "launch_mb": fixtures.LAUNCH_MB},
    {"spec": "int4", "exchange": "two_way", "launch_mb": fixtures.LAUNCH_MB},
]
BAD_STEP = 2


def train(rank: int, options: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor], bool]:
    net = fixtures.model()
    step = 0
    net[2].weight.register_hook(lambda g: g * torch.nan if rank == 1 and step == BAD_STEP else g)
    outer = fixtures.ddp(net)
    wire, optimizer = gradwire.compress(outer, **options), fixtures.sgd(net)
    for step in range(fixtures.STEPS):
        optimizer.zero_grad()
        fixtures.loss(outer, rank, step).backward()
        optimizer.step()
    assert (wire.report().steps, wire.skipped) == (fixtures.STEPS, 1)
    return fixtures.tensors(net), fixtures.memories(wire), wire.session.ahead


def both(rank: int, world: int) -> None:
    for options in SPECS:
        net, memories, ahead = train(rank, options)
        assert not ahead
        known = Wire.prompt
        Wire.prompt = property(lambda wire: True)  # type: ignore[assignment, method-assign]
        try:
            net_ahead, memories_ahead, ahead = train(rank, options)
        finally:
            Wire.prompt = known  # type: ignore[method-assign]
        assert ahead
        assert fixtures.same(net, net_ahead), options
        assert fixtures.same(memories, memories_ahead), options


def test_the_hook_ahead_of_its_device() -> None:
    run_ranks(both, 2)
