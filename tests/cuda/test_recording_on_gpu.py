"""CUDA graphs for real: steps under DDP and NCCL that are recorded and repeated leave what spoken ones leave."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.engine import recording
from gradwire.engine.recording import graphs_on
from gradwire.integrations import ddp
from spawn import run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

ALWAYS = ["dgc(0.01)", "topk(0.01)", "topk(0.01) | sign", "topk(0.01) | fp16", "sign", "ef_signsgd", "int4"]
ALWAYS += ["fp16", "powersgd(2)"]
NEVER = ["qsgd", "terngrad", "randomk(0.1)"]  # they draw
IN_PLACE = ["dgc(0.01)", "topk(0.01) | sign", "ef_signsgd"]
STEPS = 16
BAD = (9, 12)  # one with either take
LOADED = 13


def train(
    spec: str, rollback: bool = True, bad: tuple[int, ...] = BAD, rules: tuple[gradwire.Rule, ...] = ()
) -> tuple[list[Tensor], list[int], tuple[int, int]]:
    """Everything that a training leaves behind, how many takes there are of each launch, and what it counted."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 10)).cuda()
    outer = DistributedDataParallel(net, gradient_as_bucket_view=True, bucket_cap_mb=0.2)
    made: list[ddp.DDPHookState] = []
    attach = ddp.DDPHookState.__init__

    def remembered(self: ddp.DDPHookState, *args: object) -> None:
        attach(self, *args)  # type: ignore[arg-type]
        made.append(self)

    ddp.DDPHookState.__init__ = remembered  # type: ignore[assignment, method-assign]
    try:
        wire = gradwire.compress(outer, spec, launch_mb=0.3, rollback=rollback, rules=rules)
    finally:
        ddp.DDPHookState.__init__ = attach  # type: ignore[method-assign]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    takes: list[int] = []
    for step in range(STEPS):
        if step == LOADED:
            assert made[0]._recorder is not None
            takes = [len(part.takes) for part in made[0]._recorder._parts]
            wire.load_state_dict(wire.state_dict())
        optimizer.zero_grad(set_to_none=False)
        batch = torch.randn(16, 64, generator=torch.Generator().manual_seed(step)).cuda()
        (outer(batch).square().mean() * (torch.inf if step in bad else 1.0)).backward()
        optimizer.step()
    assert wire.session.ahead
    memories = [x for key, x in wire.state_dict().items() if not key.startswith("gradwire/")]
    left = [p.detach().cpu().clone() for p in net.parameters()] + memories
    return left, takes, (wire.skipped, wire.report().steps)


def alone(rank: int, world: int) -> None:
    dist.destroy_process_group()
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    for spec in ALWAYS + NEVER:
        ddp.graphs_on = lambda device: None
        spoken, takes, counted = train(spec)
        assert counted == (len(BAD), STEPS) and not any(takes), spec
        ddp.graphs_on = graphs_on
        repeated, takes, counted = train(spec)
        assert counted == (len(BAD), STEPS), spec
        assert all(torch.equal(mine, known) for mine, known in zip(repeated, spoken, strict=True)), spec
        print(spec, "takes", takes, flush=True)
        if spec in ALWAYS:
            assert takes and min(takes) > 0, (spec, takes)  # one will do without memories
        if spec in NEVER:
            assert 0 in takes, (spec, takes)
    apart = (gradwire.Rule("fp16", name="4.weight", feedback="none"),)  # a launch without memories: it has one take
    ddp.graphs_on = lambda device: None
    spoken, _, _ = train("ef_signsgd", rules=apart)
    ddp.graphs_on = graphs_on
    repeated, takes, _ = train("ef_signsgd", rules=apart)
    assert set(takes) == {1, 2} and all(map(torch.equal, repeated, spoken)), takes
    for spec, rules in [*((spec, ()) for spec in IN_PLACE), ("ef_signsgd", apart)]:
        in_place(spec, rules)
    dist.destroy_process_group()


def in_place(spec: str, rules: tuple[gradwire.Rule, ...]) -> None:
    """Memories that are changed in place: recorded, and where every recording fails."""
    ddp.graphs_on = lambda device: None
    known, takes, _ = train(spec, bad=(), rules=rules)
    assert not any(takes), (spec, takes)
    ddp.graphs_on = graphs_on
    repeated, takes, _ = train(spec, rollback=False, bad=(), rules=rules)
    print(spec, "in place, takes", takes, flush=True)
    assert all(map(torch.equal, repeated, known)) and set(takes) == {1}, (spec, takes)
    with failing():
        tried, takes, _ = train(spec, rollback=False, bad=(), rules=rules)
    assert all(map(torch.equal, tried, known)) and not any(takes), (spec, takes)
    with pytest.raises(RuntimeError, match="memories had been changed already"):
        train(spec, rollback=False, rules=rules)


@contextmanager
def failing() -> Iterator[None]:
    """No recording gets beyond its first turn, which has changed memories by then."""
    record, speak = recording.record, recording._next

    def fails(talking: Any, heard: Any, done: list[Any]) -> Any:
        if heard is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        return speak(talking, heard, done)

    def badly(*about: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(recording, "_next", fails)
            return record(*about)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recording, "record", badly)
        yield


def test_nobody_can_tell_who_repeats() -> None:
    run_ranks(alone, 1, timeout=170)
