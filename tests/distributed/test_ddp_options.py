"""Whatever the options of DDP, the hook computes what the plain loop computes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fixtures
import gradwire
from spawn import Answers, cases_fixture, run_ranks

OPTIONS: dict[str, Any] = {"spec": "topk(0.1)", "bucket_mb": fixtures.BUCKET_MB}


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
    fixtures.plain_loop(net, wire, fixtures.sgd(net), range(fixtures.STEPS), rank)
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


DDP_OPTIONS: dict[str, dict[str, Any]] = {
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "static, views": {"static_graph": True, "gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "unused, views": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    "no buffers": {"broadcast_buffers": False},
}


def with_options(rank: int, world: int, options: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return hooked(rank, fixtures.model(), **options), looped(rank, fixtures.model())


ddp_options = cases_fixture(with_options, (1, 2), DDP_OPTIONS)


@pytest.mark.parametrize("case", DDP_OPTIONS)
def test_options_of_ddp_change_nothing(case: str, ddp_options: Answers):
    for hook, loop in ddp_options[case]:
        assert fixtures.same(hook, loop)


def by_optimizer(rank: int, net: nn.Module) -> dict[str, Tensor]:
    optimizer = gradwire.DistributedOptimizer(fixtures.sgd(net), net.named_parameters(), **OPTIONS)
    for step in range(fixtures.STEPS):
        optimizer.zero_grad()
        fixtures.loss(net, rank, step).backward()
        optimizer.step()
    return {**fixtures.tensors(net), **fixtures.memories(optimizer.wire)}


MODELS: dict[str, Any] = {"frozen": frozen, "tied": Tied}


def odd_models(rank: int, world: int, make: Any) -> tuple[dict[str, Tensor], ...]:
    return looped(rank, make()), hooked(rank, make()), by_optimizer(rank, make())


models = cases_fixture(odd_models, 2, MODELS)


@pytest.mark.parametrize("case", MODELS)
def test_frozen_parameters_and_tied_weights(case: str, models: Answers):
    for loop, hook, optimizer in models[case]:
        assert fixtures.same(loop, hook) and fixtures.same(loop, optimizer)
        if case == "frozen":
            assert torch.equal(loop["2.weight"], frozen()[2].weight)
        else:
            assert "residual/inner.weight" in loop and "residual/outer.weight" not in loop


class Strided(nn.Module):
    """Parameters that are not contiguous: a transposed matrix, and a convolution in channels_last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.weight = nn.Parameter((torch.randn(10, 18) / 4).t())
        self.conv = nn.Conv2d(2, 4, 2).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(torch.tanh(x @ self.weight.t()).view(-1, 2, 3, 3)).flatten(1)


STRIDED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    f"{spec}, {how}": ({"spec": spec, "bucket_mb": fixtures.BUCKET_MB}, options)
    for spec in ("topk(0.1)", "int8", "powersgd(1)", "hadamard | int4", "variance")
    for how, options in {"copies": {}, "views": {"gradient_as_bucket_view": True}}.items()
}


def strided(rank: int, world: int, case: tuple[dict[str, Any], dict[str, Any]]) -> list[dict[str, Tensor]]:
    """Parameters, memories and debts: in a plain loop, under DDP, and in a plain loop of contiguous parameters."""
    answers = []
    for entry in ("loop", "hook", "contiguous"):
        net = Strided()
        if entry == "contiguous":
            net.weight.data, net.conv.weight.data = net.weight.data.contiguous(), net.conv.weight.data.contiguous()
        outer = fixtures.ddp(net, **case[1]) if entry == "hook" else net
        wire, optimizer = gradwire.compress(outer, **case[0]), fixtures.sgd(net)
        for step in range(fixtures.STEPS):
            optimizer.zero_grad()
            wire.observe({name: 1e-3 * p.detach().square() for name, p in net.named_parameters()})  # laid out as p is
            fixtures.loss(outer, rank, step).backward()
            if entry != "hook":
                wire()
            optimizer.step()
        debts = {f"debt/{name}": x for name, x in wire.debts().items()}
        answers.append({**fixtures.tensors(net), **fixtures.memories(wire), **debts})
    return answers


strides = cases_fixture(strided, 2, STRIDED)


@pytest.mark.parametrize("case", STRIDED)
def test_parameters_that_are_not_contiguous(case: str, strides: Answers):
    for loop, hook, contiguous in strides[case]:
        assert fixtures.same(hook, loop)
        for name, x in contiguous.items():  # convolutions in another layout round differently
            torch.testing.assert_close(hook[name], x, rtol=1e-3, atol=1e-4)


def ignored_by_ddp(rank: int, world: int) -> list[str]:
    net = fixtures.model()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["2.weight"])
    return list(hooked(rank, net))


def test_parameters_that_ddp_ignores_are_left_alone():
    for names in run_ranks(ignored_by_ddp, 2):
        assert "residual/2.weight" not in names and "residual/0.weight" in names


def accumulate_under_ddp(rank: int, view: bool) -> tuple[dict[str, Tensor], int]:
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
    return fixtures.tensors(net), wire.report().steps


def accumulate(rank: int, world: int) -> list[tuple[dict[str, Tensor], int]]:
    """Two backward passes for each step: in a plain loop, under DDP, and with views of buckets."""
    net = fixtures.model()
    wire = gradwire.compress(net, **OPTIONS)
    optimizer = fixtures.sgd(net)
    for step in range(fixtures.STEPS):
        optimizer.zero_grad()
        fixtures.loss(net, rank, 100 + step).backward()
        fixtures.loss(net, rank, step).backward()
        wire()
        optimizer.step()
    loop = fixtures.tensors(net), wire.report().steps
    return [loop, *(accumulate_under_ddp(rank, view) for view in (False, True))]


def test_gradients_accumulate_without_sync():
    for (loop, _), *hooks in run_ranks(accumulate, 2):
        for hook, steps in hooks:
            assert fixtures.same(hook, loop) and steps == fixtures.STEPS


@contextmanager
def autocast() -> Iterator[None]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield


def mixed_precision(rank: int, world: int) -> list[dict[str, Tensor]]:
    """Parameters of the loop, of the hook and of a model that is bfloat16 throughout."""
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
    half = fixtures.model().bfloat16()
    wire = gradwire.compress(half, **OPTIONS)
    optimizer = fixtures.sgd(half)
    for step in range(fixtures.STEPS):
        optimizer.zero_grad()
        half(fixtures.batch(rank, step).bfloat16()).square().mean().backward()
        wire()
        optimizer.step()
    return [fixtures.tensors(model) for model in (net, outer.module, half)]


def test_bfloat16_under_autocast_and_throughout():
    first, second = run_ranks(mixed_precision, 2)
    loop, hook, half = first
    assert fixtures.same(loop, hook)
    assert all(map(fixtures.same, first, second)), "ranks drift apart"
    assert half["0.weight"].dtype == torch.bfloat16


def wrong_call(rank: int, world: int) -> str:
    wire = gradwire.compress(fixtures.ddp(fixtures.model()), "topk(0.1)")
    return fixtures.error_text(wire)


def test_a_call_of_a_hooked_wire_is_refused():
    (text,) = run_ranks(wrong_call, 1)
    assert text.startswith("RuntimeError") and "DDP" in text
