"""DDP's hook without a thread and without a look, as on a GPU with NCCL, computes what it computes with both."""

from typing import Any

import torch
from torch import Tensor

import gradwire
import scenes
from gradwire.adapters.wire import Wire
from workers import run_ranks

SPECS: list[dict[str, Any]] = [
    {"spec": "dgc(0.1)", "launch_mb": scenes.LAUNCH_MB},
    {"spec": "int4", "exchange": "two_way", "launch_mb": scenes.LAUNCH_MB},
]
BAD_STEP = 2


def train(rank: int, options: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor], bool]:
    net = scenes.model()
    step = 0
    net[2].weight.register_hook(lambda g: g * torch.nan if rank == 1 and step == BAD_STEP else g)
    outer = scenes.ddp(net)
    wire, optimizer = gradwire.compress(outer, **options), scenes.sgd(net)
    for step in range(scenes.STEPS):
        optimizer.zero_grad()
        scenes.loss(outer, rank, step).backward()
        optimizer.step()
    assert (wire.report().steps, wire.skipped) == (scenes.STEPS, 1)
    return scenes.tensors(net), scenes.memories(wire), wire.session.ahead


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
        assert scenes.same(net, net_ahead), options
        assert scenes.same(memories, memories_ahead), options


def test_the_hook_ahead_of_its_device() -> None:
    run_ranks(both, 2)
