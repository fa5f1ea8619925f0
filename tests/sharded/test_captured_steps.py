"""Steps of shards that are captured and replayed, as on GPUs with NCCL: the same results, and no status is read."""

from typing import Any, NamedTuple

import pytest
import torch
from tests.sharded_fixtures import local, mesh_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import fixtures
import gradwire
from fake_cuda_graph import FakeCudaGraph, eager_and_captured
from gradwire.engine import status
from spawn import Answers, cases_fixture

SPECS: dict[str, dict[str, Any]] = {
    "topk": {"spec": "topk(0.1) | int32"},
    "two_way": {"spec": "int4", "exchange": "two_way"},
    "sum": {"spec": "bf16", "exchange": "allreduce"},
    "in place": {"spec": "int4", "exchange": "two_way", "rollback": False},
}
KINDS = ("sharded", "plain")
CASES = {f"{name}, {kind}": (options, kind) for name, options in SPECS.items() for kind in KINDS}
STEPS = 18
CAPTURED = 10  # from here on every step is captured, if this rank has all gradients
BAD_STEP = 12
LACKING = {14: (1,), 15: (0, 1), 16: (0,)}  # by step: the replicas that do not use a layer
NEVER_UNUSED = {14: (1,), 16: (0,)}  # what no replica uses is refused without rollback


class OptionalLayer(nn.Module):
    """A net with a layer that is left out at times, and a parameter of one row, of which one shard has none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.optional, self.head = nn.Linear(10, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.scale = nn.Parameter(torch.ones(1))
        self.left_out = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        return self.head(x if self.left_out else self.optional(x).tanh()) * self.scale


class Trained(NamedTuple):
    parameters: dict[str, Tensor]
    memories: dict[str, Tensor]
    read: list[int]
    skipped: int
    captures: int


def sharded(net: OptionalLayer) -> DeviceMesh:
    """Shard a net over half of the ranks; the mesh between replicas."""
    mesh = mesh_of(2, 2)
    fully_shard(net.optional, mesh=mesh["shard"])
    fully_shard(net, mesh=mesh["shard"])
    return mesh["replicate"]


def train(rank: int, options: dict[str, Any], kind: str) -> Trained:
    made, reads, read, step = FakeCudaGraph.made, list[int](), status.read, 0
    lacking, bad = (LACKING, BAD_STEP) if options.get("rollback", True) else (NEVER_UNUSED, None)

    def noted(statuses: Any) -> int:
        reads.append(step)
        return read(statuses)

    def spoil(p: Tensor) -> None:
        if rank == 1 and step == bad:
            local(p.grad)[0] = torch.inf

    net = OptionalLayer()
    across = sharded(net) if kind == "sharded" else None
    net.head.weight.register_post_accumulate_grad_hook(spoil)
    wire = gradwire.compress(net, across=across, bucket_mb=fixtures.BUCKET_MB, **options)
    wire.link.stream_ordered, status.read = True, noted
    optimizer = fixtures.sgd(net)
    for step in range(STEPS):
        net.left_out = rank // 2 in lacking.get(step, ())
        optimizer.zero_grad()
        net(fixtures.batch(rank, step)).square().mean().backward()
        wire()
        optimizer.step()
    status.read = read
    params = {name: local(p.detach()).clone() for name, p in net.named_parameters()}
    return Trained(params, fixtures.memories(wire), reads, wire.skipped, FakeCudaGraph.made - made)


def both(rank: int, world: int, case: tuple[dict[str, Any], str]) -> tuple[Trained, Trained]:
    return eager_and_captured(train, rank, *case)


answers = cases_fixture(both, 4, CASES)


@pytest.mark.parametrize("case", CASES)
def test_captured_steps_compute_the_same(answers: Answers, case: str) -> None:
    """Also when a gradient is missing on one replica, or on both, or is not finite on one shard of one of them."""
    for eager, captured in answers[case]:
        assert eager.captures == 0 and captured.captures > 0
        assert fixtures.same(eager.parameters, captured.parameters)
        assert fixtures.same(eager.memories, captured.memories)
        assert eager.skipped == captured.skipped == (0 if "in place" in case else 1)


@pytest.mark.parametrize("case", CASES)
def test_a_status_is_first_read_where_this_rank_lacks_a_gradient(answers: Answers, case: str) -> None:
    """A replica that has all of them does not read it where the other one lacks some."""
    lacking = NEVER_UNUSED if "in place" in case else LACKING
    for rank, (eager, captured) in enumerate(answers[case]):
        assert set(eager.read) == set(range(STEPS))
        first = min(step for step, replicas in lacking.items() if rank // 2 in replicas)
        assert {step for step in captured.read if CAPTURED <= step <= first} == {first}
