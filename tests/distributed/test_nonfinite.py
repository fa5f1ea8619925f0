"""A gradient that is not finite, on one rank, drops the step on all ranks and leaves all state unchanged."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fixtures
import gradwire
from spawn import Answers, cases_fixture, run_ranks

# By the kind of message that carries the status: sums, gathers, all-to-alls, and several in one step.
SPECS = fixtures.by_name(
    {"spec": "fp16", "bundle": None, "feedback": "residual"},
    {"spec": "powersgd(2)", "bundle": None},
    {"spec": "topk(0.1)", "bundle": None},
    {"spec": "variance", "bundle": None},
    {"spec": "int4", "exchange": "two_way", "bundle": None},
    {"spec": "topk(0.1) | sign"},
    {"spec": "dgc(0.1, clip=0.5)"},
    {"spec": "sign", "feedback": "ef21", "granularity": "model"},
    # The bad layer is in a bucket that sends nothing of its own.
    {"spec": "topk(0.1)", "rules": (gradwire.Rule("int8", "2.*", exchange="noop"),), "bucket_mb": fixtures.BUCKET_MB},
)
VALUES = {"nan": math.nan, "inf": math.inf}
CASES = {f"{name}, {value}": (SPECS[name], VALUES[value]) for name in SPECS for value in VALUES}
ENTRY_POINTS = ("plain", "hook", "optimizer")
BAD_STEP = 2


class Fault:
    """Multiplies the gradient of one layer, on one rank and in one step, by NaN or infinity."""

    def __init__(self, net: nn.Sequential, rank: int, value: float) -> None:
        self.step = -1
        self.rank, self.value = rank, value
        net[2].weight.register_hook(self.spoil)

    def spoil(self, grad: Tensor) -> Tensor:
        return grad * self.value if self.rank == 1 and self.step == BAD_STEP else grad


def build(door: str, rank: int, value: float, options: dict[str, Any]) -> tuple[Any, ...]:
    net = fixtures.model()
    fault = Fault(net, rank, value)
    if door == "hook":
        outer: nn.Module = fixtures.ddp(net)
        return net, outer, gradwire.compress(outer, **options), fixtures.sgd(net), fault
    if door == "optimizer":
        optimizer = gradwire.DistributedOptimizer(fixtures.sgd(net), net.named_parameters(), **options)
        return net, net, optimizer.wire, optimizer, fault
    return net, net, gradwire.compress(net, **options), fixtures.sgd(net), fault


State = tuple[dict[str, Tensor], dict[str, Tensor]]


def drop(rank: int, world: int, case: tuple[dict[str, Any], float]) -> tuple[State, dict[str, State]]:
    """Parameters and state without the bad step, and with it through every entry point."""
    options, value = case
    healthy = fixtures.model()
    wire = gradwire.compress(healthy, **options)
    for steps in (range(BAD_STEP), range(BAD_STEP + 1, 5)):
        fixtures.plain_loop(healthy, wire, fixtures.sgd(healthy), steps, rank)
    expected = fixtures.tensors(healthy), fixtures.memories(wire)
    trained = {door: one_door(door, rank, value, options) for door in ENTRY_POINTS}
    return expected, {door: (fixtures.tensors(net), fixtures.memories(other)) for door, (net, other) in trained.items()}


def one_door(door: str, rank: int, value: float, options: dict[str, Any]) -> tuple[nn.Module, gradwire.Wire]:
    net, outer, wire, optimizer, fault = build(door, rank, value, options)
    for step in range(5):
        fault.step = step
        optimizer.zero_grad()
        before, memories = fixtures.tensors(net), fixtures.memories(wire)
        fixtures.loss(outer, rank, step).backward()
        if door == "plain":
            wire()
        optimizer.step()
        if step == BAD_STEP:
            assert all(not p.grad.any() for p in net.parameters()), (door, options)
            assert fixtures.same(fixtures.tensors(net), before), (door, options)
            assert fixtures.same(fixtures.memories(wire), memories), (door, options)
        assert wire.skipped == (1 if step >= BAD_STEP else 0), (door, options)
    report = wire.report()
    assert (report.steps, report.skipped) == (5, 1)
    return net, wire


answers = cases_fixture(drop, 2, CASES)


@pytest.mark.parametrize("door", ENTRY_POINTS)
@pytest.mark.parametrize("case", CASES)
def test_a_bad_gradient_drops_the_step_on_all_ranks(case: str, door: str, answers: Answers):
    """The result is that of a training without that step."""
    for (parameters, memories), trained in answers[case]:
        assert fixtures.same(trained[door][0], parameters)
        assert fixtures.same(trained[door][1], memories)


def delayed(rank: int, world: int) -> list[dict[str, Tensor]]:
    """The mean of the step before is still returned; then that of the bad step is missing."""
    net, _, wire, optimizer, fault = build("plain", rank, math.nan, {"spec": "fp32", "exchange": "delayed"})
    updates = []
    for step in range(5):
        fault.step = step
        optimizer.zero_grad()
        fixtures.loss(net, rank, 0).backward()
        wire()
        updates.append({name: p.grad.clone() for name, p in net.named_parameters()})
    assert wire.skipped == 1
    return updates


def test_a_delayed_step_is_dropped_one_step_later():
    for updates in run_ranks(delayed, 2):
        assert not any(update.any() for update in updates[0].values())
        assert fixtures.same(updates[1], updates[2]) and updates[1]["0.weight"].any()
        assert not any(update.any() for update in updates[3].values())
        assert fixtures.same(updates[4], updates[1])


def spoiled_backward(net: nn.Sequential, rank: int, step: int) -> None:
    """A backward pass that is not finite in one step, and lacks a gradient on all ranks in another one."""
    net.zero_grad()
    fixtures.loss(net, rank, step).backward()
    if rank == 1 and step == BAD_STEP:
        net[2].weight.grad.fill_(math.nan)
    if step == BAD_STEP + 2:
        net[0].weight.grad = None


def delayed_updates(rank: int, world: int, options: dict[str, Any]) -> list[dict[str, Tensor]]:
    net = fixtures.model()
    wire = gradwire.compress(net, **options)
    updates = []
    for step in range(7):
        spoiled_backward(net, rank, step)
        wire()
        updates.append({name: p.grad.clone() for name, p in net.named_parameters()})
    return updates


def test_delayed_updates_come_in_one_order_in_processes_and_in_lockstep() -> None:
    """Also around a step that is skipped, and one in which a parameter is not used."""
    options = {"spec": "int4", "exchange": "delayed", "bundle": None}
    real = run_ranks(delayed_updates, 2, options)
    nets, workers = fixtures.replicas(2, **options)
    for step in range(7):
        for rank, net in enumerate(nets):
            spoiled_backward(net, rank, step)
        workers()
        for rank, net in enumerate(nets):
            found = {name: p.grad for name, p in net.named_parameters()}
            assert fixtures.same(found, real[rank][step]), step


def observed(rank: int, world: int) -> dict[str, Tensor]:
    """Moments of a dropped batch are dropped with it; a NaN among them would stay forever."""
    net, _, wire, optimizer, fault = build("plain", rank, math.nan, {"spec": "variance", "bundle": None})
    for step in range(4):
        fault.step = step
        optimizer.zero_grad()
        fixtures.loss(net, rank, step).backward()
        wire.observe({name: p.grad.square() for name, p in net.named_parameters()})
        wire()
        optimizer.step()
    return wire.state_dict()


def test_observed_moments_of_a_dropped_step_are_forgotten():
    for state in run_ranks(observed, 2):
        assert all(bool(torch.isfinite(memory).all()) for memory in state.values())
        assert not any(key.startswith("observed/") for key in state)
