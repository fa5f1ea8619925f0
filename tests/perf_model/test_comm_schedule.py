"""The schedule made without content is what the library really asks of a backend."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

import gradwire
from gradwire.codecs import Codec
from gradwire.core.requests import CommGenerator, Sum
from gradwire.engine.plan import Rule, build, default_rules
from gradwire.exchanges import Aggregate, AllReduce, CommContext, Message
from gradwire_lab.perf_model.comm_schedule import SETTLED, schedule, sent
from gradwire_lab.perf_model.local_steps import SPARSE
from gradwire_lab.perf_model.microbenchmark import time_coding
from gradwire_lab.perf_model.model import ModelProfile

SHAPES = {"embed": (60, 16), "wide": (40, 50), "bias": (40,), "deep": (32, 8, 3, 3), "norm": (32,), "head": (10, 32)}
FIXED = ("fp32", "bf16", "int8", "int4", "sign", "powersgd(2)", "randomk(0.1)", "topk(0.1) | int32", "majority_vote")
FIXED += ("onebit_adam", "zero_one_adam")  # whose start is over
VARYING = ("topk(0.1)", "topk(0.05) | sign", "dgc(0.1)")


def grads() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("spec", FIXED)
def test_the_schedule_equals_the_real_collectives(spec: str, world: int) -> None:
    plan = build(SHAPES, default_rules(spec), world, bucket_bytes=12_000)
    assert len(plan.buckets) > 1
    planned = [call for bucket in schedule(plan, SETTLED) for call in bucket.calls]
    real = time_coding(plan, grads(), repeats=1).calls
    assert [(m.kind, m.dtype) for m in planned] == [(m.kind, m.dtype) for m in real]
    assert [m.nbytes for m in planned] == pytest.approx([m.nbytes for m in real])


@pytest.mark.parametrize("spec", VARYING)
def test_messages_of_varying_length_are_bounded(spec: str) -> None:
    plan = build(SHAPES, default_rules(spec), 4)
    buckets = schedule(plan, 0)
    real = time_coding(plan, grads(), repeats=1).calls
    planned = [call for bucket in buckets for call in bucket.calls]
    assert [m.kind for m in planned] == [m.kind for m in real]
    assert all(t.nbytes >= h.nbytes for t, h in zip(planned, real, strict=True))
    assert sent(buckets, 4) < 1.5 * 3 * sum(m.nbytes for m in real)


@pytest.mark.parametrize("spec", ["bf16", "int4", "powersgd(2)"])
def test_bytes_equal_what_exchanges_declare(spec: str) -> None:
    """The whole of a step, less the status."""
    plan = build(SHAPES, (Rule(spec),), 4)
    promised = sum(lane.at(0)[1].traffic(lane.at(0)[0], lane.units, 4) for lane in plan.lanes)
    assert sent(schedule(plan, 0), 4) == pytest.approx(promised, rel=0.03, abs=8)


@pytest.mark.parametrize("spec", ["bf16", "int4", "sign", "powersgd(2)", "topk(0.01)"])
@pytest.mark.parametrize("world", [64, 512])
def test_large_worlds_are_extrapolated(spec: str, world: int) -> None:
    plan = build({"a": (300, 400), "b": (500, 200)}, (Rule(spec),), world)
    promised = sum(lane.at(0)[1].traffic(lane.at(0)[0], lane.units, world) for lane in plan.lanes)
    assert sent(schedule(plan, 0), world) == pytest.approx(promised, rel=0.03, abs=9 * world)


def test_the_message_of_local_steps_is_that_of_their_rounds() -> None:
    shapes = {"0.weight": (300, 200), "0.bias": (300,), "1.weight": (40, 300)}
    models = [nn.Sequential(nn.Linear(200, 300), nn.Linear(300, 40, bias=False)) for _ in range(4)]
    optimizers = [torch.optim.AdamW(model.parameters(), 0.01) for model in models]
    rounds = gradwire.local_lockstep(models, optimizers, "sparseloco(H=1, keep=1.0, scales='bf16')")
    for model, optimizer in zip(models, optimizers, strict=True):
        model(torch.randn(8, 200)).square().mean().backward()
        optimizer.step()
    rounds()
    real = rounds.ranks[0].report().rounds.sent
    planned = sent(ModelProfile(shapes).buckets(SPARSE, 4), 4)
    assert real <= planned < 1.15 * real


@dataclass(frozen=True)
class DoubledSum(AllReduce):
    """An exchange that the schedule has no line for."""

    def run(self, message: Message, codec: Codec, context: CommContext) -> CommGenerator[Aggregate]:
        yield Sum(torch.ones(100, device=message.content.data.device))
        return (yield from AllReduce().run(message, codec, context))


def test_a_new_exchange_needs_no_line_in_the_schedule() -> None:
    plan = build({"a": (30, 40)}, (Rule("fp32", exchange=DoubledSum()),), 4)
    (bucket,) = schedule(plan, 0)
    assert [call.nbytes for call in bucket.calls] == [4 * 101, 4 * 1200]
