"""Compiled modules, in and outside of DDP, and in plain loops. The backend runs eagerly: graphs are what matters."""

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import fixtures
import gradwire
from spawn import run_ranks


def train(net: torch.nn.Module, rank: int, wire: gradwire.Wire | None) -> None:
    optimizer = fixtures.sgd(net)
    for step in range(4):
        optimizer.zero_grad()
        fixtures.loss(net, rank, step).backward()
        if wire is not None:
            wire()
        optimizer.step()


def compiled(rank: int, world: int) -> dict[str, dict[str, Tensor]]:
    found = {}
    for way in ("eager", "plain", "within", "around"):
        net = fixtures.model()
        inner = torch.compile(net, backend="aot_eager") if way in ("plain", "within") else net
        outer = DistributedDataParallel(inner) if way in ("within", "around") else inner
        outer = torch.compile(outer, backend="aot_eager") if way == "around" else outer
        wire = gradwire.compress(outer, "topk(0.1)", launch_mb=fixtures.LAUNCH_MB)
        train(outer, rank, wire if way in ("eager", "plain") else None)
        assert wire.report().steps == 4
        found[way] = {**fixtures.tensors(net), **fixtures.memories(wire)}
    return found


def test_compiled_models_train_as_eager_ones_do():
    first, second = run_ranks(compiled, 2, timeout=100)
    for way, found in first.items():
        assert found.keys() == first["eager"].keys(), "compiled or not, parameters keep their names"
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, first["eager"][name], msg=f"{way}: {name}")
            if "/" not in name:
                assert torch.equal(tensor, second[way][name]), f"ranks drift apart: {way}, {name}"
