"""Fused equals composed: messages, updates and memories, bit for bit, over several steps."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire.engine import Engine, Lockstep, Plan, build, default_rules
from gradwire.engine.encoders import ComposedEncoder, Encoder, FusedDenseEncoder, FusedSumEncoder, FusedTopKEncoder
from gradwire.engine.gradients import views_of
from gradwire.engine.state import LaneMemory
from gradwire.engine.views import GradViews
from gradwire.kernels.dispatch import reference_only

WORLD = 3
SHAPES = {"a.weight": (64, 300), "a.bias": (64,), "b.weight": (100, 64), "empty": (0, 4), "b.bias": (10,)}
FUSED = [
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
    ("onebit_adam(start=2, per=64)", None, None),
    ("int4", "common_momentum(divide='after')", "two_way"),
    ("topk(0.05) | fp16", "common_momentum", None),
    ("sign(per=16)", "preconditioned_momentum(decay=0.9)", "two_way"),
    ("int8", "preconditioned_momentum", None),
    ("dgc_adam(0.05, start=2)", None, None),
    ("topk(0.05)", "preconditioned_momentum(0.8, masking=True)", None),
    ("topk(0.05) | sign | int32", "preconditioned_momentum(decay=0.9, masking=True)", "two_way"),
    ("topk(1)", None, None),
    ("dgc(1)", None, None),
    ("fp32", "residual(decay=0.9)", None),
    ("fp32", "residual", "delayed"),
    ("fp32", "momentum_correction", None),
    ("fp32", "momentum_correction(nesterov=True)", None),
]


COMPOSED = [
    ("topk(0.01)", "none", None),  # no error to keep
    ("topk(0.01)", "ef21", None),
    ("sign", "momentum_correction", None),  # two memories, which dense kernels do not have
    ("fp32", "preconditioned_momentum", None),  # gradients enter momentum first, and the sum has no error to keep
    ("threshold(0.9)", None, None),
    ("sampled_topk(0.05)", None, None),
    ("hadamard | sign", None, None),
    ("qsgd", "residual", None),
    ("fp16", "residual", None),
    ("powersgd(2)", None, None),
]


def averages(how: tuple[str, str | None, str | None]) -> bool:
    """Whether a gradient enters momentum, so that it does not weigh as much as an error."""
    return how[0].startswith("dgc(") or "momentum" in (how[1] or "")


def make_engines(plan: Plan) -> list[Engine]:
    return [Engine(plan, rank, WORLD, 0, torch.device("cpu")) for rank in range(WORLD)]


def gradients(step: int, dtype: torch.dtype = torch.float32) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(step)
    return [
        {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in SHAPES.items()} for _ in range(WORLD)
    ]


def freeze(engines: list[Engine]) -> None:
    """Have lanes divide by something, which is the same on all ranks; some of it is zero, and counts as one."""
    for engine in engines:
        draw = torch.Generator().manual_seed(7)
        for state in engine.states:
            if "denominator" in state.tensors:
                made = torch.randn(state.tensors["denominator"].shape, generator=draw).clamp_(min=0.0)
                state.tensors["denominator"].copy_(made)


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
    engines = make_engines(plan)
    freeze(engines)
    group = Lockstep(WORLD)
    left: list[Tensor] = []
    for step in range(steps):
        grads = gradients(step, dtype)
        for result in group.drive([engine.run(mine) for engine, mine in zip(engines, grads, strict=True)]):
            left += [result.updates[name] for name in SHAPES]
    for engine in engines:
        for lane, state in zip(plan.lanes, engine.states, strict=True):
            assert state.tensors.keys() == lane.state_specs(WORLD).keys()
            left += [state.tensors[name] for name in lane.state_specs(WORLD)]
    return left, [account.sent for account in group.traffic]


def encoders_of(
    spec: str, feedback: str | None, exchange: str | None, granularity: str = "layer"
) -> set[type[Encoder]]:
    """Those of all steps of the lanes that are not a bundle of 1-D tensors."""
    plan = build(SHAPES, default_rules(spec, feedback, exchange, granularity), WORLD)
    lanes = [lane for lane in plan.lanes if lane.label == "*"]
    return {type(lane.encoder(step)) for lane in lanes for step in range(6)}


@pytest.mark.parametrize("granularity", ["layer", "model"])
@pytest.mark.parametrize("how", FUSED, ids=lambda how: how[0])
def test_fused_equals_composed(how: tuple[str, str | None, str | None], granularity: str) -> None:
    assert encoders_of(*how, granularity) & {FusedTopKEncoder, FusedDenseEncoder, FusedSumEncoder}
    with reference_only():
        assert encoders_of(*how, granularity) == {ComposedEncoder}
    same(*how, granularity)


@pytest.mark.parametrize("how", COMPOSED, ids=lambda how: f"{how[0]} {how[1]}")
def test_what_has_no_fused_kernel_is_composed(how: tuple[str, str | None, str | None]) -> None:
    assert encoders_of(*how) == {ComposedEncoder}


@pytest.mark.parametrize(
    ("how", "encoder"),
    [
        (("topk(0.01)", None, None), FusedTopKEncoder),
        (("dgc(0.01)", None, None), FusedTopKEncoder),
        (("sign", None, "two_way"), FusedDenseEncoder),
        (("int4", "residual", None), FusedDenseEncoder),
        (("fp32", "residual", "allreduce"), FusedSumEncoder),
        (("fp32", "residual", "allgather"), ComposedEncoder),  # whose payloads are not added
    ],
)
def test_encoders_are_chosen_by_what_stages_declare(
    how: tuple[str, str | None, str | None], encoder: type[Encoder]
) -> None:
    assert encoders_of(*how) == {encoder}


@pytest.mark.parametrize("how", FUSED, ids=lambda how: how[0])
def test_a_dropped_step_leaves_the_state_as_it_was(how: tuple[str, str | None, str | None]) -> None:
    """The kernels have written new memories by then."""
    engines = make_engines(build(SHAPES, default_rules(*how), WORLD))
    freeze(engines)
    group = Lockstep(WORLD)
    for step in range(3):
        grads = gradients(step)
        before = [[{name: x.clone() for name, x in state.tensors.items()} for state in e.states] for e in engines]
        if step == 2:
            grads[1]["b.weight"][-1, -1] = torch.inf
        results = group.drive([engine.run(mine) for engine, mine in zip(engines, grads, strict=True)])
    for engine, known, result in zip(engines, before, results, strict=True):
        assert engine.skipped == 1 and result.skipped and not any(x.any() for x in result.updates.values())
        for state, old in zip(engine.states, known, strict=True):
            assert state.tensors.keys() == old.keys()
            assert all(torch.equal(state.tensors[name], old[name]) for name in old)


# Momentum correction would add a gradient to its momentum too, and a carried error to its residual alone.
@pytest.mark.parametrize("how", [how for how in FUSED if not averages(how)], ids=lambda how: how[0])
def test_an_error_that_is_carried_is_sent(how: tuple[str, str | None, str | None]) -> None:
    """It has no memory, so no fused kernel knows it: that one step is composed."""
    plan = build(SHAPES, default_rules(*how), WORLD)
    with_error, added = make_engines(plan), make_engines(plan)
    group = Lockstep(WORLD)
    for engine in with_error:
        for lane, state in zip(plan.lanes, engine.states, strict=True):
            state.carried_error = torch.linspace(-1.0, 1.0, lane.units.total)
    grads, own = gradients(0), gradients(0)
    for lane in plan.lanes:
        for name, place in lane.slices.items():
            for mine in own:
                mine[name] += torch.linspace(-1.0, 1.0, lane.units.total)[place].view(SHAPES[name])
    results = group.drive([engine.run(mine) for engine, mine in zip(with_error, grads, strict=True)])
    expected = group.drive([engine.run(mine) for engine, mine in zip(added, own, strict=True)])
    for result, known in zip(results, expected, strict=True):
        assert all(torch.equal(result.updates[name], known.updates[name]) for name in SHAPES)
    for mine, other in zip(with_error, added, strict=True):
        for state, known_state in zip(mine.states, other.states, strict=True):
            assert state.carried_error is None
            assert all(torch.equal(state.tensors[name], known_state.tensors[name]) for name in known_state.tensors)


def test_values_that_are_too_large_to_be_added_stay_in_the_error() -> None:
    plan = build({"w": (2,)}, default_rules("fp32", "residual"), WORLD)
    engines, group = make_engines(plan), Lockstep(WORLD)
    for definitions in (False, True):
        grads = [{"w": torch.tensor([3e38, -1.0])} for _ in engines]
        with reference_only() if definitions else nullcontext():
            results = group.drive([engine.run(mine) for engine, mine in zip(engines, grads, strict=True)])
        for engine, result in zip(engines, results, strict=True):
            left = engine.states[0].tensors["residual"]
            assert torch.isfinite(result.updates["w"]).all() and left[0] > 1e38 and left[1] == 0.0
            engine.states[0].replace({"residual": torch.zeros(2)})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "how",
    [("dgc(0.01)", None, None), ("topk(0.01)", None, None), ("sign", "residual", None), ("int4", "residual", None)],
    ids=lambda how: how[0],
)
def test_gradients_of_sixteen_bits(
    how: tuple[str, str | None, str | None], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    same(*how, "layer", dtype, 3)
    plan = build(SHAPES, default_rules(*how, "layer"), WORLD)
    read: list[torch.dtype] = []
    flat = GradViews.flat
    monkeypatch.setattr(
        GradViews, "flat", lambda self, *args: read.append(flat(self, *args).dtype) or flat(self, *args)
    )
    engine, fused = make_engines(plan)[0], 0
    for lane, state in zip(plan.lanes, engine.states, strict=True):
        read.clear()
        views = views_of(lane, gradients(0, dtype)[0], engine.device)
        lane.encoder(0).encode(views, state, LaneMemory({}), lane.context(engine.key, WORLD), [])
        is_composed = isinstance(lane.encoder(0), ComposedEncoder)
        assert set(read) == {torch.float32 if is_composed else dtype}  # kernels widen as they go
        fused += not is_composed
    assert fused


def same(*how: Any) -> None:
    outcomes = []
    for definitions in (False, True):
        with reference_only() if definitions else nullcontext():
            outcomes.append(run(*how))
    (fused, fused_bytes), (composed, composed_bytes) = outcomes
    assert fused_bytes == composed_bytes
    for mine, known in zip(fused, composed, strict=True):
        assert torch.equal(mine, known)
