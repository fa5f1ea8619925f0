"""Gradients that FSDP reduces when backward is over hold up no others, wherever their parameters are registered."""

from typing import Any

import pytest
import torch
from tests.sharded_fixtures import mesh_of
from torch import nn
from torch.distributed.fsdp import fully_shard

import fixtures
import gradwire
from gradwire.engine.plan import Plan, build, default_rules
from spawn import Answers, cases_fixture

SHAPES = {"table": (50, 4), "position": (3, 4), "a": (10, 4), "b": (10, 4), "norm": (4,), "head": (50, 4)}
LATE = frozenset({"table", "position", "norm", "head"})


def names(plan: Plan) -> list[list[str]]:
    return [[name for lane in bucket for name in lane.tensors.names] for bucket in plan.buckets]


def test_late_gradients_travel_last_and_share_no_bucket_with_others() -> None:
    """A small one takes a large one along; 1-D tensors are in the last bucket, as always."""
    rules, size = default_rules("int4"), 4 * 60
    assert names(build(SHAPES, rules, 2, size)) == [["head"], ["b"], ["a", "position"], ["norm", "table"]]
    late = names(build(SHAPES, rules, 2, size, reduced_last=LATE))
    assert late == [["b"], ["a"], ["head"], ["norm", "position", "table"]]


def test_where_all_gradients_are_late_there_are_still_several_buckets() -> None:
    plan = build(SHAPES, default_rules("fp32"), 2, 4 * 200, reduced_last=SHAPES)
    assert names(plan) == [["head"], ["norm", "b", "a", "position", "table"]]


def train(rank: int, world: int, spec: str) -> list[int]:
    """By step: how many buckets have left when the first gradient of the outer module comes."""
    torch.manual_seed(0)
    layers = [nn.Linear(16, 16) for _ in range(4)]
    net = nn.Sequential(nn.Linear(10, 16), *layers, nn.Linear(16, 3))
    mesh = mesh_of(2, 1)
    for layer in layers:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(net, mesh=mesh["shard"])
    sent: list[Any] = []
    found: list[int] = []
    net[5].weight.register_post_accumulate_grad_hook(lambda p: found.append(len(sent)))  # before the wire's hook
    wire = gradwire.compress(net, spec, across=mesh["replicate"], bucket_mb=fixtures.BUCKET_MB)
    submit = wire.worker.submit
    wire.worker.submit = lambda work: sent.append(work) or submit(work)
    optimizer = fixtures.sgd(net)
    for step in range(3):
        sent.clear()
        optimizer.zero_grad()
        net(fixtures.batch(rank, step)).square().mean().backward()
        optimizer.step()
    return found


CASES = {spec: spec for spec in ("topk(0.1)", "fp32")}
answers = cases_fixture(train, 2, CASES)


@pytest.mark.parametrize("case", CASES)
def test_buckets_of_inner_modules_leave_before_the_outer_one_is_reduced(answers: Answers, case: str) -> None:
    for first, *later in answers[case]:
        assert first == 0 and min(later) > 0
