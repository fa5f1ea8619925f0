"""The DDP hook that captures buckets and replays them, as on a GPU with NCCL, computes what it does without."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import fixtures
import gradwire
from fake_cuda_graph import FakeCudaGraph, eager_and_captured
from spawn import Answers, cases_fixture

# What to compress by, and whether a checkpoint is loaded halfway.
SPECS: dict[str, tuple[dict[str, Any], bool]] = {
    "topk": ({"spec": "topk(0.1) | int32", "feedback": "momentum_correction", "bucket_mb": fixtures.BUCKET_MB}, False),
    "int4": ({"spec": "int4", "exchange": "two_way", "bucket_mb": fixtures.BUCKET_MB}, True),
    "int4 in place": (
        {"spec": "int4", "exchange": "two_way", "bucket_mb": fixtures.BUCKET_MB, "rollback": False},
        True,
    ),
    "hosts": (
        {"spec": "topk(0.1) | int32", "across": [[0, 1]], "bucket_mb": fixtures.BUCKET_MB},
        False,
    ),
    "hosts of one": (
        {"spec": "topk(0.1) | int32", "across": [[0], [1]], "bucket_mb": fixtures.BUCKET_MB},
        False,
    ),
}
STEPS = 12
BAD_STEP = 8


class Trained(NamedTuple):
    parameters: dict[str, Tensor]
    memories: dict[str, Tensor]
    traffic: Any
    captures: int


def train(rank: int, options: dict[str, Any], loads: bool) -> Trained:
    captured = FakeCudaGraph.made
    net = fixtures.model()
    step, bad = 0, BAD_STEP if options.get("rollback", True) else None
    net[2].weight.register_hook(lambda g: g * torch.nan if rank == 1 and step == bad else g)
    outer = fixtures.ddp(net, gradient_as_bucket_view=True)
    wire, optimizer = gradwire.compress(outer, **options), fixtures.sgd(net)
    wire.link.stream_ordered = True
    for step in range(STEPS):
        if loads and step == 7:
            wire.load_state_dict(wire.state_dict())  # other tensors, the same numbers
        optimizer.zero_grad(set_to_none=False)
        fixtures.loss(outer, rank, step).backward()
        optimizer.step()
    assert (wire.report().steps, wire.skipped) == (STEPS, int(bad is not None))
    return Trained(fixtures.tensors(net), fixtures.memories(wire), wire.link.traffic, FakeCudaGraph.made - captured)


def both(rank: int, world: int, case: tuple[dict[str, Any], bool]) -> tuple[Trained, Trained]:
    return eager_and_captured(train, rank, *case)


answers = cases_fixture(both, 2, SPECS)


@pytest.mark.parametrize("case", SPECS)
def test_captured_launches_compute_the_same(case: str, answers: Answers) -> None:
    for eager, captured in answers[case]:
        assert eager.captures == 0 and captured.captures > 0
        assert fixtures.same(eager.parameters, captured.parameters)
        assert fixtures.same(eager.memories, captured.memories)
        assert eager.traffic == captured.traffic
