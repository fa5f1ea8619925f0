"""DDP as people configure it: whatever its options, the hook computes what the plain loop computes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fixtures
import gradwire
from spawn import run_ranks

OPTIONS: dict[str, Any] = {"spec": "topk(0.1)", "launch_mb": fixtures.LAUNCH_MB}


def hooked(rank: int, net: nn.Module, **options: Any) -> dict[str, Tensor]:
    """Train a model under DDP."""
    outer = fixtures.ddp(net, **options)
    wire = gradwire.compress(outer, **OPTIONS)
    optimizer = fixtures.sgd(outer)
    for step in range(fixtures.STEPS):
        optimizer.zero_grad()
        fixtures.loss(outer, rank, step).backward()
        optimizer.step()
    return {**fixtures.tensors(net), **fixtures.memories(wire)}


def looped(rank: int, net: nn.Module) -> dict[str, Tensor]:
    wire = gradwire.compress(net, **OPTIONS)
    fixtures.plain(net, wire, fixtures.sgd(net), range(fixtures.STEPS), rank)
    return {**fixtures.tensors(net), **fixtures.memories(wire)}


def frozen() -> nn.Sequential:
    net = fixtures.model()
    net[2].requires_grad_(False)
    net[4].bias.requires_grad_(False)
    return net


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner = nn.Linear(10, 10)
        self.outer = nn.Linear(10, 10)
        self.outer.weight = self.inner.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x)))


def options_of_ddp(rank: int, world: int) -> None:
    expected = looped(rank, fixtures.model())
    for options in (
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"static_graph": True, "gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
        {"find_unused_parameters": True, "gradient_as_bucket_view": True},
        {"broadcast_buffers": False},
    ):
        assert fixtures.same(hooked(rank, fixtures.model(), **options), expected), options


@pytest.mark.parametrize("world", [1, 2])
def test_bucket_views_static_graphs_and_searches_for_the_unused_change_nothing(world: int):
    run_ranks(options_of_ddp, world)


def odd_models(rank: int, world: int) -> None:
    for make in (frozen, Tied):
        expected = looped(rank, make())
        assert fixtures.same(hooked(rank, make()), expected), make
        net = make()
        optimizer = gradwire.DistributedOptimizer(fixtures.sgd(net), net.named_parameters(), **OPTIONS)
        for step in range(fixtures.STEPS):
            optimizer.zero_grad()
            fixtures.loss(net, rank, step).backward()
            optimizer.step()
        assert fixtures.same({**fixtures.tensors(net), **fixtures.memories(optimizer.wire)}, expected), make
    assert fixtures.same({"2.weight": looped(rank, frozen())["2.weight"]}, {"2.weight": frozen()[2].weight})
    assert "residual/inner.weight" in looped(rank, Tied()) and "residual/outer.weight" not in looped(rank, Tied())


def test_frozen_parameters_and_tied_weights():
    run_ranks(odd_models, 2)


def ignored_by_ddp(rank: int, world: int) -> None:
    net = fixtures.model()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["2.weight"])
    found = hooked(rank, net)
    assert "residual/2.weight" not in found and "residual/0.weight" in found


def test_what_ddp_ignores_is_left_alone():
    run_ranks(ignored_by_ddp, 2)


def accumulate(rank: int, world: int) -> None:
    """Two backward passes for each step, under all doors."""
    found = []
    for view in (False, True):
        net = fixtures.model()
        outer = fixtures.ddp(net, gradient_as_bucket_view=view)
        wire = gradwire.compress(outer, **OPTIONS)
        optimizer = fixtures.sgd(outer)
        for step in range(fixtures.STEPS):
            optimizer.zero_grad()
            with outer.no_sync():
                fixtures.loss(outer, rank, 100 + step).backward()
            fixtures.loss(outer, rank, step).backward()
            optimizer.step()
        assert wire.report().steps == fixtures.STEPS
        found.append(fixtures.tensors(net))
    net = fixtures.model()
    wire = gradwire.compress(net, **OPTIONS)
    optimizer = fixtures.sgd(net)
    for step in range(fixtures.STEPS):
        optimizer.zero_grad()
        fixtures.loss(net, rank, 100 + step).backward()
        fixtures.loss(net, rank, step).backward()
        wire()
        optimizer.step()
    assert all(fixtures.same(one, fixtures.tensors(net)) for one in found)


def test_gradients_accumulate_without_sync():
    run_ranks(accumulate, 2)


@contextmanager
def autocast() -> Iterator[None]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield


def mixed_precision(rank: int, world: int) -> dict[str, Tensor]:
    outer = fixtures.ddp(fixtures.model())
    net = fixtures.model()
    gradwire.compress(outer, **OPTIONS)
    wire = gradwire.compress(net, **OPTIONS)
    for model in (outer, net):
        optimizer = fixtures.sgd(model)
        for step in range(fixtures.STEPS):
            optimizer.zero_grad()
            with autocast():
                loss = fixtures.loss(model, rank, step)
            loss.backward()
            if model is net:
                wire()
            optimizer.step()
    assert fixtures.same(fixtures.tensors(outer.module), fixtures.tensors(net))
    half = fixtures.model().bfloat16()  # and a model that is bfloat16 throughout
    wire = gradwire.compress(half, **OPTIONS)
    optimizer = fixtures.sgd(half)
    for step in range(fixtures.STEPS):
        optimizer.zero_grad()
        half(fixtures.batch(rank, step).bfloat16()).square().mean().backward()
        wire()
        optimizer.step()
    return {**fixtures.tensors(net), **{f"half.{name}": p for name, p in fixtures.tensors(half).items()}}


def test_bfloat16():
    first, second = run_ranks(mixed_precision, 2)
    assert fixtures.same(first, second)
    assert first["half.0.weight"].dtype == torch.bfloat16


def wrong_call(rank: int, world: int) -> str:
    wire = gradwire.compress(fixtures.ddp(fixtures.model()), "topk(0.1)")
    return fixtures.sentence(wire)


def test_a_hooked_wire_needs_no_call():
    (said,) = run_ranks(wrong_call, 1)
    assert "DDP calls this wire by itself" in said and "remove the call" in said
