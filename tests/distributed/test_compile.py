"""Compiled modules, inside and around DDP, and in plain loops. The backend runs eagerly: only the graphs matter."""

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import fixtures
import gradwire
from spawn import Answers, cases_fixture


def train(net: torch.nn.Module, rank: int, wire: gradwire.Wire | None) -> None:
    optimizer = fixtures.sgd(net)
    for step in range(4):
        optimizer.zero_grad()
        fixtures.loss(net, rank, step).backward()
        if wire is not None:
            wire()
        optimizer.step()


WAYS = ("plain", "inside DDP", "around DDP")


def compiled(rank: int, world: int, way: str) -> dict[str, Tensor]:
    net = fixtures.model()
    inner = torch.compile(net, backend="aot_eager") if way in ("plain", "inside DDP") else net
    outer = DistributedDataParallel(inner) if "DDP" in way else inner
    outer = torch.compile(outer, backend="aot_eager") if way == "around DDP" else outer
    wire = gradwire.compress(outer, "topk(0.1)", bucket_mb=fixtures.BUCKET_MB)
    train(outer, rank, None if "DDP" in way else wire)
    assert wire.report().steps == 4
    return {**fixtures.tensors(net), **fixtures.memories(wire)}


def eager_and_compiled(rank: int, world: int, way: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return compiled(rank, world, "eager"), compiled(rank, world, way)


answers = cases_fixture(eager_and_compiled, 2, {way: way for way in WAYS})


@pytest.mark.parametrize("case", WAYS)
def test_compiled_models_train_as_eager_ones_do(case: str, answers: Answers):
    (eager, found), (_, other) = answers[case]
    assert found.keys() == eager.keys(), "compiled or not, parameters keep their names"
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, eager[name], msg=name)
        if "/" not in name:
            assert torch.equal(tensor, other[name]), f"ranks drift apart: {name}"
