"""DDP's hook that records launches and repeats them, as on a GPU with NCCL, computes what it computes unrecorded."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fixtures
import gradwire
from fake_cuda_graph import WrittenGraph, WrittenGraphs, largest
from gradwire.engine import session
from gradwire.integrations import ddp
from gradwire.integrations.wire import Wire
from gradwire.kernels import dispatch, fused
from spawn import run_ranks

# What to compress by, and whether a checkpoint is loaded halfway.
SPECS: list[tuple[dict[str, Any], bool]] = [
    ({"spec": "topk(0.1) | int32", "feedback": "momentum_correction", "launch_mb": fixtures.LAUNCH_MB}, False),
    ({"spec": "int4", "exchange": "two_way", "launch_mb": fixtures.LAUNCH_MB}, True),
    ({"spec": "int4", "exchange": "two_way", "launch_mb": fixtures.LAUNCH_MB, "rollback": False}, True),
]
STEPS = 12
BAD_STEP = 8


def censored(flat: Tensor) -> tuple[Tensor, Tensor]:
    """As on a device: nobody looks."""
    fine = torch.isfinite(flat).all()
    return torch.where(fine, flat, 0.0), ~fine


def train(rank: int, options: dict[str, Any], loads: bool) -> tuple[dict[str, Tensor], dict[str, Tensor], Any]:
    net = fixtures.model()
    step, bad = 0, BAD_STEP if options.get("rollback", True) else None
    net[2].weight.register_hook(lambda g: g * torch.nan if rank == 1 and step == bad else g)
    outer = fixtures.ddp(net, gradient_as_bucket_view=True)
    wire, optimizer = gradwire.compress(outer, **options), fixtures.sgd(net)
    for step in range(STEPS):
        if loads and step == 7:
            wire.load_state_dict(wire.state_dict())  # other tensors, the same numbers
        optimizer.zero_grad(set_to_none=False)
        fixtures.loss(outer, rank, step).backward()
        optimizer.step()
    assert wire.session.ahead and (wire.report().steps, wire.skipped) == (STEPS, int(bad is not None))
    return fixtures.tensors(net), fixtures.memories(wire), wire.link.traffic


def both(rank: int, world: int) -> None:
    Wire.prompt = property(lambda wire: True)  # type: ignore[assignment, method-assign]
    dispatch.faster = lambda device: {}  # type: ignore[assignment]
    fused._largest, session.censored = largest, censored  # type: ignore[assignment]
    known: Callable[[torch.device], None] = lambda device: None  # noqa: E731
    for options, loads in SPECS:
        ddp.graphs_on = known
        net, memories, sent = train(rank, options, loads)
        made = WrittenGraph.made
        ddp.graphs_on = lambda device: WrittenGraphs()  # type: ignore[assignment]
        net_again, memories_again, sent_again = train(rank, options, loads)
        assert WrittenGraph.made > made
        assert fixtures.same(net, net_again), options
        assert fixtures.same(memories, memories_again), options
        assert sent == sent_again, options


def test_the_hook_repeats_itself() -> None:
    run_ranks(both, 2)
