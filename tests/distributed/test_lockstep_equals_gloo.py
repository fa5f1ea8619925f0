"""Lockstep equals real processes: gathers bit for bit, sums up to rounding."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fixtures
import gradwire
from spawn import Answers, cases_fixture

WORLD = 3
STEPS = 4
GATHERS = fixtures.by_name(
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
)
SUMS = fixtures.by_name(
    {"spec": "fp32"},
    {"spec": "fp16", "feedback": "residual"},
    {"spec": "bf16"},
    {"spec": "randomk(0.2)"},
    {"spec": "powersgd(2)"},
    {"spec": "dgc(0.1)", "bundle": "fp16"},
)


def whole(options: dict[str, Any]) -> dict[str, Any]:
    return {"bundle": None, "bucket_mb": fixtures.BUCKET_MB, **options}


def observe(rank: int, world: int, options: dict[str, Any]) -> list[dict[str, dict[str, Tensor]]]:
    """For each step: the state before, the gradient after the exchange, the state after, and the traffic."""
    net = fixtures.model()
    wire = gradwire.compress(net, **whole(options))
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
        fixtures.sgd_step(net)
    return steps


def repeat(options: dict[str, Any], seen: list[Any], step: int) -> tuple[Any, Any]:
    """The same step in lockstep, from the same state on every rank."""
    nets, workers = fixtures.replicas(WORLD, **whole(options))
    for rank, net in enumerate(nets):
        net.load_state_dict(seen[rank][step]["net"])
        workers.wires[rank].load_state_dict(seen[rank][step]["before"])
        fixtures.loss(net, rank, step).backward()
    workers()
    return nets, workers


answers = cases_fixture(observe, WORLD, {**GATHERS, **SUMS})


@pytest.mark.parametrize("case", GATHERS)
def test_gathers_are_equal_bit_for_bit(case: str, answers: Answers):
    """A whole training from the same start."""
    real = answers[case]
    nets, workers = fixtures.replicas(WORLD, **whole(GATHERS[case]))
    for step in range(STEPS):
        for rank, net in enumerate(nets):
            assert fixtures.same(fixtures.tensors(net), real[rank][step]["net"]), step
            net.zero_grad()
            fixtures.loss(net, rank, step).backward()
        workers()
        for rank, (net, wire) in enumerate(zip(nets, workers.wires, strict=True)):
            assert fixtures.same(wire.state_dict(), real[rank][step]["after"]), step
            traffic = wire.link.traffic
            counted = torch.tensor([traffic.sent, traffic.received, traffic.collectives])
            assert torch.equal(counted, real[rank][step]["traffic"]["bytes"]), step
            fixtures.sgd_step(net)


@pytest.mark.parametrize("case", SUMS)
def test_sums_are_equal_up_to_rounding_step_by_step(case: str, answers: Answers):
    """One step at a time from the same state: a selection would amplify differences of rounding."""
    real, options = answers[case], SUMS[case]
    digits = {"fp16": 2**-10, "bf16": 2**-7}.get(options["spec"], 1e-5)
    digits = 2**-10 if "bundle" in options else digits
    for step in range(STEPS):
        nets, workers = repeat(options, real, step)
        for rank, (net, wire) in enumerate(zip(nets, workers.wires, strict=True)):
            for name, p in net.named_parameters():
                expected = real[rank][step]["update"][name]
                close = 2 * digits * float(expected.abs().max())
                torch.testing.assert_close(p.grad, expected, rtol=2 * digits, atol=close, msg=f"{step} {name}")
            for name, held in wire.state_dict().items():
                expected = real[rank][step]["after"][name]
                torch.testing.assert_close(held, expected, rtol=1e-4, atol=1e-5, msg=f"{step} {name}")
