"""CUDA graphs for real: captured steps leave what eager steps leave, whatever entry point the training uses."""

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.engine.capture import graphs_on
from gradwire.integrations import wire as wires
from spawn import Answers, cases_fixture

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SPECS = ["dgc(0.01)", "topk(0.01)", "topk(0.01) | sign", "topk(0.01) | fp16", "sign", "ef_signsgd", "int4", "fp16"]
SPECS += ["powersgd(2)", "qsgd", "terngrad", "randomk(0.1)", "topk(0.01) | qsgd"]
IN_PLACE = ["dgc(0.01)", "topk(0.01) | sign", "ef_signsgd"]
ADAMW = ["onebit_adam(start=2, per=1024)", "dgc_adam(0.01, start=5)"]
DOORS = ["ddp", "loop", "moving", "optimizer", "hosts"]
STEPS = 16
BAD = (9, 12)  # one with either generation of the state
LOADED = 13


class Trained(NamedTuple):
    left: list[Tensor]
    captures: list[int]
    skipped: int
    steps: int


def train(door: str, spec: str, rollback: bool = True) -> Trained:
    """Everything that a training leaves behind, how many captures each bucket has, and what was counted."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 10)).cuda()
    outer: Any = DistributedDataParallel(net, gradient_as_bucket_view=True, bucket_cap_mb=0.2) if door == "ddp" else net
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.05)
    if spec in ADAMW:
        optimizer = gradwire.AdamW(net.parameters(), lr=0.01, fused=True)
    if door == "optimizer":
        optimizer = gradwire.DistributedOptimizer(
            optimizer, net.named_parameters(), spec, bucket_mb=0.3, rollback=rollback
        )
        wire = optimizer.wire
    else:
        across = [[0]] if door == "hosts" else None
        chosen = {"optimizer": optimizer} if spec in ADAMW else {}
        wire = gradwire.compress(outer, spec, bucket_mb=0.3, rollback=rollback, across=across, **chosen)
    captures: list[int] = []
    held: list[Any] = []  # so that moving gradients do not come to the same addresses
    for step in range(STEPS):
        if step == LOADED:
            captures = [len(bucket.captures) for bucket in wire.executor._buckets]
            wire.load_state_dict(wire.state_dict())
        held.append([p.grad for p in net.parameters()])
        optimizer.zero_grad(set_to_none=door == "moving")
        batch = torch.randn(16, 64, generator=torch.Generator().manual_seed(step)).cuda()
        (outer(batch).square().mean() * (torch.inf if rollback and step in BAD else 1.0)).backward()
        if door not in ("ddp", "optimizer"):
            wire()
        optimizer.step()
    memories = [x for key, x in wire.state_dict().items() if not key.startswith("gradwire/")]
    left = [p.detach().cpu().clone() for p in net.parameters()] + memories
    return Trained(left, captures, wire.skipped, wire.report().steps)


def both(rank: int, world: int, case: tuple[str, str, bool]) -> tuple[Trained, Trained]:
    torch.cuda.set_device(0)
    if dist.get_backend() != "nccl":
        dist.destroy_process_group()
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    wires.graphs_on = lambda device: None
    eager = train(*case)
    wires.graphs_on = graphs_on
    return eager, train(*case)


CASES = {f"{door} {spec}": (door, spec, True) for door in DOORS for spec in SPECS}
CASES |= {f"{door} {spec} in place": (door, spec, False) for door in ("ddp", "loop") for spec in IN_PLACE}
CASES |= {f"{door} {spec}": (door, spec, True) for door in ("ddp", "moving", "optimizer") for spec in ADAMW}
CASES |= {f"ddp {spec} in place": ("ddp", spec, False) for spec in ADAMW}
answers = cases_fixture(both, 1, CASES, timeout=500)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES)
def test_captured_steps_equal_eager_steps(case: str, answers: Answers) -> None:
    ((eager, captured),) = answers[case]
    bad = 0 if case.endswith("in place") else len(BAD)
    assert (eager.skipped, eager.steps) == (captured.skipped, captured.steps) == (bad, STEPS)
    assert not any(eager.captures) and min(captured.captures) > 0, captured.captures
    assert all(map(torch.equal, captured.left, eager.left))
