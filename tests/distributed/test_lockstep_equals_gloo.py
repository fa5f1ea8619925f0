"""Lockstep is the same code: gathers equal those of real processes bit for bit, sums to rounding."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fixtures
import gradwire
from spawn import run_ranks

WORLD = 3
STEPS = 4
GATHERS: list[dict[str, Any]] = [
    {"spec": "topk(0.1)"},
    {"spec": "topk(0.1) | sign | int32", "granularity": "bucket"},
    {"spec": "randomk(0.2)", "exchange": "allgather", "feedback": "residual"},
    {"spec": "int8", "exchange": "two_way"},
    {"spec": "qsgd", "exchange": "delayed(inner=allgather)"},
    {"spec": "hadamard | int4", "exchange": "allgather"},
    {"spec": "sign", "feedback": "ef21", "exchange": "allgather", "granularity": "model"},
    {"spec": "majority_vote"},
    {"spec": "dgc(0.1, clip=0.5, nesterov=True)"},
    {"spec": "variance"},
    {"spec": "adacomp"},
]
SUMS: list[dict[str, Any]] = [
    {"spec": "fp32"},
    {"spec": "fp16", "feedback": "residual"},
    {"spec": "bf16"},
    {"spec": "randomk(0.2)"},
    {"spec": "powersgd(2)"},
    {"spec": "dgc(0.1)", "bundle": "fp16"},
]


def observe(rank: int, world: int, several: list[dict[str, Any]]) -> list[list[dict[str, dict[str, Tensor]]]]:
    """For each spec and step: the state before, the gradient handed back, and the state after."""
    found = []
    for options in several:
        net = fixtures.model()
        wire = gradwire.compress(net, **{"bundle": None, "launch_mb": fixtures.LAUNCH_MB, **options})
        steps = []
        for step in range(STEPS):
            seen = {"net": fixtures.tensors(net), "before": wire.state_dict()}
            net.zero_grad()
            fixtures.loss(net, rank, step).backward()
            wire()
            seen["update"] = {name: p.grad.clone() for name, p in net.named_parameters()}
            seen["after"] = wire.state_dict()
            traffic = wire.link.traffic
            seen["traffic"] = {"bytes": torch.tensor([traffic.sent, traffic.received, traffic.collectives])}
            steps.append(seen)
            fixtures.descend(net)
        found.append(steps)
    return found


def repeat(options: dict[str, Any], seen: list[Any], step: int) -> tuple[Any, Any]:
    """The same step in lockstep, from the same state on every rank."""
    nets, workers = fixtures.replicas(WORLD, **{"bundle": None, "launch_mb": fixtures.LAUNCH_MB, **options})
    for rank, net in enumerate(nets):
        net.load_state_dict(seen[rank][step]["net"])
        workers.wires[rank].load_state_dict(seen[rank][step]["before"])
        fixtures.loss(net, rank, step).backward()
    workers()
    return nets, workers


@pytest.fixture(scope="module")
def real() -> list[Any]:
    """By rank, spec and step."""
    return run_ranks(observe, WORLD, GATHERS + SUMS, timeout=100)


@pytest.mark.parametrize("i", range(len(GATHERS)), ids=lambda i: GATHERS[i]["spec"])
def test_gathers_are_equal_bit_for_bit(i: int, real: list[Any]):
    """A whole training, without looking back at the real one."""
    nets, workers = fixtures.replicas(WORLD, **{"bundle": None, "launch_mb": fixtures.LAUNCH_MB, **GATHERS[i]})
    for step in range(STEPS):
        for rank, net in enumerate(nets):
            assert fixtures.same(fixtures.tensors(net), real[rank][i][step]["net"]), step
            net.zero_grad()
            fixtures.loss(net, rank, step).backward()
        workers()
        for rank, (net, wire) in enumerate(zip(nets, workers.wires, strict=True)):
            assert fixtures.same(wire.state_dict(), real[rank][i][step]["after"]), step
            traffic = wire.link.traffic
            counted = torch.tensor([traffic.sent, traffic.received, traffic.collectives])
            assert torch.equal(counted, real[rank][i][step]["traffic"]["bytes"]), step
            fixtures.descend(net)


@pytest.mark.parametrize("j", range(len(SUMS)), ids=lambda j: SUMS[j]["spec"])
def test_sums_are_equal_to_rounding_step_by_step(j: int, real: list[Any]):
    """One step at a time from the same state: a selection would blow up differences of rounding."""
    i = len(GATHERS) + j
    seen = [rank[i] for rank in real]
    digits = {"fp16": 2**-10, "bf16": 2**-7}.get(SUMS[j]["spec"], 1e-5)
    digits = 2**-10 if "bundle" in SUMS[j] else digits
    for step in range(STEPS):
        nets, workers = repeat(SUMS[j], seen, step)
        for rank, (net, wire) in enumerate(zip(nets, workers.wires, strict=True)):
            for name, p in net.named_parameters():
                expected = seen[rank][step]["update"][name]
                close = 2 * digits * float(expected.abs().max())
                torch.testing.assert_close(p.grad, expected, rtol=2 * digits, atol=close, msg=f"{step} {name}")
            for name, held in wire.state_dict().items():
                expected = seen[rank][step]["after"][name]
                torch.testing.assert_close(held, expected, rtol=1e-4, atol=1e-5, msg=f"{step} {name}")
