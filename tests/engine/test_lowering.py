"""Fused equals composed: messages, updates and memories, bit for bit, over several steps."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire.engine import Lockstep, Session, build, default_rules
from gradwire.kernels.dispatch import reference_only

WORLD = 3
SHAPES = {"a.weight": (64, 300), "a.bias": (64,), "b.weight": (100, 64), "empty": (0, 4), "b.bias": (10,)}
LOWERED = [
    ("topk(0.01)", None, None),
    ("topk(0.05) | sign | int32", "residual(decay=0.9)", "two_way"),
    ("topk(0.001) | fp16 | gap16", None, None),
    ("topk(0.01) | terngrad | bitmap", None, "delayed"),
    ("dgc(0.01)", None, None),
    ("dgc(0.01, nesterov=True, masking=False)", None, None),
    ("ramp(topk(0.01) | sign, steps=4)", None, None),
    ("sign", None, "allgather"),
    ("sign(scale='norm')", "residual(decay=0.5)", "two_way"),
    ("sign", None, "majority"),
    ("int4", "residual", None),
    ("int8(block=100)", "residual", "delayed"),
    ("int2", "residual", None),
    ("topk(1)", None, None),
    ("dgc(1)", None, None),
]


def run(
    spec: str,
    feedback: str | None,
    exchange: str | None,
    granularity: str,
    dtype: torch.dtype = torch.float32,
    steps: int = 6,
) -> tuple[list[Tensor], list[float]]:
    """Everything that some steps leave behind, and the bytes they sent."""
    plan = build(SHAPES, default_rules(spec, feedback, exchange, granularity), WORLD)
    sessions = [Session(plan, rank, WORLD, 0, torch.device("cpu")) for rank in range(WORLD)]
    group = Lockstep(WORLD)
    left: list[Tensor] = []
    for step in range(steps):
        draw = torch.Generator().manual_seed(step)
        grads = [
            {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in SHAPES.items()} for _ in sessions
        ]
        for verdict in group.drive([s.run(grad) for s, grad in zip(sessions, grads, strict=True)]):
            left += [verdict.updates[name] for name in SHAPES]
    for session in sessions:
        for lane, memory in zip(plan.lanes, session.memories, strict=True):
            left += [memory[name] for name in lane.slots(WORLD)]
    return left, [account.sent for account in group.traffic]


@pytest.mark.parametrize("how", LOWERED, ids=lambda how: how[0])
def test_a_dropped_step_leaves_no_trace(how: tuple[str, str | None, str | None]) -> None:
    """The kernels have written new memories by then."""
    plan = build(SHAPES, default_rules(*how), WORLD)
    sessions = [Session(plan, rank, WORLD, 0, torch.device("cpu")) for rank in range(WORLD)]
    group = Lockstep(WORLD)
    for step in range(3):
        draw = torch.Generator().manual_seed(step)
        grads = [{name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()} for _ in sessions]
        before = [[{name: x.clone() for name, x in held.items()} for held in s.memories] for s in sessions]
        if step == 2:
            grads[1]["b.weight"][-1, -1] = torch.inf
        group.drive([s.run(grad) for s, grad in zip(sessions, grads, strict=True)])
    for session, known in zip(sessions, before, strict=True):
        assert session.skipped == 1
        for held, old in zip(session.memories, known, strict=True):
            assert held.keys() == old.keys()
            assert all(torch.equal(held[name], old[name]) for name in old)


@pytest.mark.parametrize("granularity", ["layer", "model"])
@pytest.mark.parametrize("how", LOWERED, ids=lambda how: how[0])
def test_fused_equals_composed(how: tuple[str, str | None, str | None], granularity: str) -> None:
    plan = build(SHAPES, default_rules(*how, granularity), WORLD)
    assert any(
        lane.lowered(memory, session._key(), WORLD)
        for session in [Session(plan, 0, WORLD, 0, torch.device("cpu"))]
        for lane, memory in zip(plan.lanes, session.memories, strict=True)
    )
    same(*how, granularity)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "how",
    [("dgc(0.01)", None, None), ("topk(0.01)", None, None), ("sign", "residual", None), ("int4", "residual", None)],
    ids=lambda how: how[0],
)
def test_gradients_of_sixteen_bits(how: tuple[str, str | None, str | None], dtype: torch.dtype) -> None:
    same(*how, "layer", dtype, 3)
    session = Session(build(SHAPES, default_rules(*how, "layer"), WORLD), 0, WORLD, 0, torch.device("cpu"))
    grads = {name: torch.zeros(shape, dtype=dtype) for name, shape in SHAPES.items()}
    for lane, memory in zip(session.plan.lanes, session.memories, strict=True):
        read = session._vector(lane, grads, memory, 1.0)
        assert isinstance(read, torch.Tensor)
        assert read.dtype == (dtype if lane.lowered(memory, session._key(), WORLD) else torch.float32)


def same(*how: Any) -> None:
    outcomes = []
    for definitions in (False, True):
        with reference_only() if definitions else nullcontext():
            outcomes.append(run(*how))
    (fused, fused_bytes), (composed, composed_bytes) = outcomes
    assert fused_bytes == composed_bytes
    for mine, known in zip(fused, composed, strict=True):
        assert torch.equal(mine, known)
