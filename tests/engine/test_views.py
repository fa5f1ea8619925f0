"""Gradients are read and overwritten where they lie, however they lie; the bits are those of a copy end to end."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fixtures
import gradwire
from gradwire.codecs.decoding import Entries
from gradwire.core.layout import Flat, Scattered, memory_layout
from gradwire.engine import Engine, Lockstep, Plan, Rule, build, default_rules, views
from gradwire.engine.views import GradViews
from gradwire.kernels import fused
from spawn import Answers, cases_fixture

CPU = torch.device("cpu")
SHAPES = {"a.weight": (64, 300), "a.bias": (64,), "b.weight": (100, 64), "b.bias": (10,), "c.weight": (30, 70)}
RULES = {
    "topk": default_rules("topk(0.01)", bundle=None),
    "dgc": default_rules("dgc(0.01)", bundle=None),
    "composed": default_rules("topk(0.01)", "none", bundle=None),
    "two lanes": (Rule("topk(0.02) | fp16", name="a.*"), *default_rules("topk(0.01)", bundle=None)),
    "a dense lane": default_rules("dgc(0.01)"),
    "signs": default_rules("ef_signsgd", bundle=None),
    "signs of blocks": default_rules("sign(per=1000)", "residual", "allgather", bundle=None),
    "integers": default_rules("int4(block=100)", "residual", "two_way", bundle=None),
    "levels": default_rules("qsgd", bundle=None),
    "more rounds": (Rule("int4", name="b.*", exchange="two_way"), *default_rules("topk(0.01)", bundle=None)),
    "a mean that is no update": (Rule("topk(0.02)", name="a.*", feedback="ef21"), *default_rules("topk(0.01)")),
    "float32": default_rules("fp32"),
    "delayed": default_rules("sign", None, "delayed"),
}
BAD = {2: ("b.weight", torch.inf), 4: ("a.bias", torch.nan)}  # steps that are dropped
Grads = dict[str, Tensor]


def end_to_end(plan: Plan, grads: Grads) -> Grads:
    """The gradients of each lane end to end, one entry off from where memory is aligned."""
    moved: Grads = {}
    for lane in plan.lanes:
        whole = torch.cat([torch.zeros(1), *(grads[name].flatten() for name in lane.tensors.names)])
        parts = whole[1:].split(lane.tensors.lengths)
        moved |= {name: x.view(SHAPES[name]) for name, x in zip(lane.tensors.names, parts, strict=True)}
    return moved


def transposed(plan: Plan, grads: Grads) -> Grads:
    """As gradients of transposed weights lie: not contiguous."""
    return {name: x.t().contiguous().t() for name, x in grads.items()}


def strided(plan: Plan, grads: Grads) -> Grads:
    """Every other entry of a buffer."""
    wide = {name: torch.full((*x.shape, 2), torch.nan) for name, x in grads.items()}
    return {name: wide[name][..., 1].copy_(x) for name, x in grads.items()}


def apart(plan: Plan, grads: Grads) -> Grads:
    return grads


LAYOUTS: dict[str, Callable[[Plan, Grads], Grads]] = {
    "apart": apart,
    "end to end": end_to_end,
    "transposed": transposed,
    "strided": strided,
}


def gradients(plan: Plan, step: int, rank: int, dtype: torch.dtype = torch.float32) -> Grads:
    """Of one rank."""
    draw = torch.Generator().manual_seed(10 * step + rank)
    grads = {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in SHAPES.items()}
    if step in BAD and rank == plan.world - 1:
        grads[BAD[step][0]].view(-1)[-1] = BAD[step][1]
    return grads


def run_steps(
    plan: Plan, lay: Callable[[Plan, Grads], Grads] = apart, rollback: bool = True, unscale: float = 1.0
) -> list[Tensor]:
    """Everything that some steps hand out and leave behind. Every update lies where its gradient lay."""
    engines = [Engine(plan, rank, plan.world, 0, CPU, rollback) for rank in range(plan.world)]
    left: list[Tensor] = []
    for step in range(6 if rollback else 2):
        grads = [lay(plan, gradients(plan, step, rank)) for rank in range(plan.world)]
        results = drive(engines, grads, unscale)
        for result, mine in zip(results, grads, strict=True):
            assert result.skipped == (rollback and step in BAD)
            assert result.updates.keys() == mine.keys()
            assert all(is_same_place(result.updates[name], mine[name]) for name in SHAPES)
            left += [mine[name].clone(memory_format=torch.contiguous_format) for name in SHAPES]
        left += state_of(engines)
    assert [engine.skipped for engine in engines] == [len(BAD) if rollback else 0] * plan.world
    return left


def drive(engines: list[Engine], grads: list[Grads], unscale: float = 1.0) -> list[Any]:
    group = Lockstep(len(engines))
    return group.drive([engine.run(mine, unscale) for engine, mine in zip(engines, grads, strict=True)])


def state_of(engines: list[Engine]) -> list[Tensor]:
    return [
        state.tensors[name].clone()
        for engine in engines
        for lane, state in zip(engine.plan.lanes, engine.states, strict=True)
        for name in lane.state_specs(engine.world)
    ]


def is_same_place(update: Tensor, grad: Tensor) -> bool:
    return update.data_ptr() == grad.data_ptr() and update.stride() == grad.stride() and torch.equal(update, grad)


def copy_all(patch: pytest.MonkeyPatch) -> None:
    """From now on all gradients are copied before they are read."""
    patch.setattr(GradViews, "in_place", False)
    patch.setattr(views, "end_to_end", lambda parts: None)


@cache
def copied_steps(kind: str, world: int, bucket_bytes: int) -> list[Tensor]:
    """What steps leave behind if all gradients are copied before they are read: the same for all layouts."""
    with pytest.MonkeyPatch.context() as patch:
        copy_all(patch)
        return run_steps(build(SHAPES, RULES[kind], world, bucket_bytes=bucket_bytes))


@cache
def plain_steps(kind: str, factor: float) -> list[Tensor]:
    """What steps leave behind if gradients lie apart: the same for all layouts."""
    plan = build(SHAPES, RULES[kind], 3)
    return run_steps(plan, lambda plan, grads: {name: x * factor for name, x in grads.items()})


@pytest.mark.parametrize("bucket_bytes", [4 * 7000, 2**20], ids=["two buckets", "one bucket"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("kind", RULES)
def test_any_layout_equals_a_copy(kind: str, world: int, layout: str, bucket_bytes: int) -> None:
    plan = build(SHAPES, RULES[kind], world, bucket_bytes=bucket_bytes)
    assert all(map(torch.equal, run_steps(plan, LAYOUTS[layout]), copied_steps(kind, world, bucket_bytes)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", RULES)
def test_unscaled_gradients_equal_a_copy(kind: str, layout: str) -> None:
    plan = build(SHAPES, RULES[kind], 3)
    assert all(map(torch.equal, run_steps(plan, LAYOUTS[layout], unscale=0.37), plain_steps(kind, 0.37)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("kind", RULES)
def test_sixteen_bit_gradients_equal_wide_ones(kind: str, world: int, dtype: torch.dtype) -> None:
    """The state is the same; the update is that of float32, rounded, where the gradient lay."""
    plan = build(SHAPES, RULES[kind], world)
    narrow, wide = ([Engine(plan, rank, world, 0, CPU) for rank in range(world)] for _ in range(2))
    for step in range(4):
        grads = [gradients(plan, step, rank, dtype) for rank in range(world)]
        wider = [{name: x.float() for name, x in mine.items()} for mine in grads]
        for result, mine, known in zip(drive(narrow, grads), grads, drive(wide, wider), strict=True):
            assert result.skipped == known.skipped == (step in BAD)
            assert all(is_same_place(result.updates[name], mine[name]) for name in SHAPES)
            assert all(torch.equal(mine[name], known.updates[name].to(dtype)) for name in SHAPES)
        assert all(map(torch.equal, state_of(narrow), state_of(wide)))


def test_mixed_formats_equal_wide_ones() -> None:
    plan = build(SHAPES, RULES["dgc"], 1)
    mixed, wide = Engine(plan, 0, 1, 0, CPU), Engine(plan, 0, 1, 0, CPU)
    grads = gradients(plan, 0, 0)
    grads["b.weight"] = grads["b.weight"].bfloat16()
    wider = {name: x.float().clone() for name, x in grads.items()}
    ((result,), (known,)) = drive([mixed], [grads]), drive([wide], [wider])
    for name in SHAPES:
        assert is_same_place(result.updates[name], grads[name])
        assert torch.equal(grads[name], known.updates[name].to(grads[name].dtype))
    assert all(map(torch.equal, state_of([mixed]), state_of([wide])))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", RULES)
def test_missing_gradients_count_as_zeros(kind: str, layout: str) -> None:
    """One rank lacks one; another lacks two, of which one is missing everywhere and keeps its state."""
    plan = build(SHAPES, RULES[kind], 3, bucket_bytes=4 * 7000)
    engines, known_engines = ([Engine(plan, rank, 3, 0, CPU) for rank in range(3)] for _ in range(2))
    for step in (0, 1, 3):
        grads = [LAYOUTS[layout](plan, gradients(plan, step, rank)) for rank in range(3)]
        zeros = [{name: x.clone() for name, x in mine.items()} for mine in grads]
        lacking: list[dict[str, Tensor | None]] = [dict(mine) for mine in grads]
        for rank, name in ((1, "a.weight"), (2, "b.weight"), (0, "a.bias"), (1, "a.bias"), (2, "a.bias")):
            lacking[rank][name] = None
            zeros[rank][name].zero_()
        before = {name: x for name, x in saved(engines[0]).items() if name.endswith("/a.bias")}
        results, known = drive(engines, lacking), drive(known_engines, zeros)
        for result, reference, mine in zip(results, known, lacking, strict=True):
            assert set(result.updates) == set(SHAPES) - {"a.bias"}
            for name, update in result.updates.items():
                grad = mine[name]
                assert torch.equal(update, reference.updates[name])
                assert grad is None or is_same_place(update, grad)
        for mine_engine, other in zip(engines, known_engines, strict=True):
            left, expected = saved(mine_engine), saved(other)
            assert all(torch.equal(left[name], expected[name]) for name in left if not name.endswith("/a.bias"))
        assert all(torch.equal(x, saved(engines[0])[name]) for name, x in before.items())


def saved(engine: Engine) -> dict[str, Tensor]:
    """The memories of every parameter; rank 0's part of shards."""
    found = gradwire.engine.checkpoint.save(engine, "")
    return {name: x for name, x in found.items() if not name.startswith("gradwire/")}


@pytest.mark.parametrize("rollback", [True, False])
@pytest.mark.parametrize("world", [1, 3])
def test_no_vector_beside_the_gradients(world: int, rollback: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = build(SHAPES, RULES["dgc"], world, bucket_bytes=4 * 7000)
    known = run_steps(plan, rollback=rollback)
    written: list[int] = []
    scatter = fused.scatter_mean_

    def write(out: Flat, *entries: Any) -> None:
        written.append((out if isinstance(out, Tensor) else out.parts[0]).data_ptr())
        scatter(out, *entries)

    def refused(*args: object) -> Tensor:
        raise AssertionError("a vector of its own, or a copy of one")

    with monkeypatch.context() as patch:
        patch.setattr(Entries, "mean", refused)
        patch.setattr(fused, "scatter_mean_", write)
        patch.setattr(torch, "_foreach_copy_", refused)
        patch.setattr(GradViews, "_encoded", refused)
        separate = run_steps(plan, rollback=rollback)
        joint = run_steps(plan, end_to_end, rollback=rollback)
    assert all(map(torch.equal, separate, known)) and all(map(torch.equal, joint, known))
    assert len(written) == 2 * world * len(plan.lanes) * (6 if rollback else 2)
    assert all(at % 16 == 4 for at in written[len(written) // 2 :])  # where gradients lie; copies are aligned


def test_gradients_are_read_where_they_lie() -> None:
    apart = [torch.randn(n) for n in (3, 70_000, 5)]
    vector = GradViews(apart, CPU).vector()
    assert isinstance(vector, Scattered) and memory_layout(vector.parts) == memory_layout(apart)
    halves = torch.randn(8).split(4)
    neighbors = GradViews(halves, CPU).vector()
    assert isinstance(neighbors, Tensor) and neighbors.data_ptr() == halves[0].data_ptr()
    scaled = GradViews(apart, CPU, factor=0.5).vector()
    assert isinstance(scaled, Tensor) and torch.equal(scaled, 0.5 * torch.cat(apart))


@pytest.mark.parametrize("across", [None, [[0, 1], [2, 3]]], ids=["flat", "hosts"])
@pytest.mark.parametrize("spec", ["topk(0.1)", "ef_signsgd", "powersgd(2)", "fp32"])
def test_simulated_workers_write_where_gradients_lie(spec: str, across: Any) -> None:
    """Also batched, where all ranks get the same tensors."""
    nets, workers = fixtures.replicas(4, spec, across=across)
    for rank, net in enumerate(nets):
        fixtures.loss(net, rank, 0).backward()
    nets[2][0].bias.grad = None
    before = [[p.grad for p in net.parameters()] for net in nets]
    places = [[None if grad is None else grad.data_ptr() for grad in grads] for grads in before]
    workers()
    for net, grads, places_of in zip(nets, before, places, strict=True):
        for p, grad, place, first in zip(net.parameters(), grads, places_of, nets[0].parameters(), strict=True):
            assert p.grad is not None and torch.equal(p.grad, first.grad)
            assert grad is None or (p.grad is grad and grad.data_ptr() == place)


# -- real ranks --------------------------------------------------------------------------------------------------------

CASES: dict[str, tuple[str, bool, dict[str, Any]]] = {
    f"{spec} {'ddp' if hooked else 'loop'}": (spec, hooked, options)
    for spec, options in (("topk(0.01)", {}), ("dgc(0.01)", {}), ("topk(0.01) | fp16", {"bundle": None}))
    for hooked in (False, True)
}


def train(rank: int, spec: str, hooked: bool, options: dict[str, Any]) -> tuple[Any, ...]:
    """Some steps, one of which is dropped."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(800, 450), nn.ReLU(), nn.Linear(450, 500))
    outer = DistributedDataParallel(model, gradient_as_bucket_view=True) if hooked else model
    wire = gradwire.compress(outer, spec, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        x = torch.randn(4, 800, generator=torch.Generator().manual_seed(10 * step + rank))
        if step == 3 and rank == 1:
            x[0, 0] = torch.inf
        optimizer.zero_grad(set_to_none=False)
        outer(x).square().mean().backward()
        places = [p.grad.data_ptr() for p in model.parameters() if p.grad is not None]
        if not hooked:
            wire()
        assert places == [p.grad.data_ptr() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    return fixtures.tensors(model), wire.state_dict(), wire.skipped, wire.report().sent


def both(rank: int, world: int, case: tuple[str, bool, dict[str, Any]]) -> tuple[int, Any, Any]:
    read: list[bool] = []
    vector = GradViews.vector

    def spy(self: GradViews, **how: bool) -> Any:
        found = vector(self, **how)
        first = found if isinstance(found, Tensor) else found.parts[0]
        read.append(first.data_ptr() == self.grads[0].data_ptr())
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GradViews, "vector", spy)
        in_place = train(rank, *case)
    with pytest.MonkeyPatch.context() as patch:
        copy_all(patch)
        return sum(read), in_place, train(rank, *case)


answers = cases_fixture(both, 2, CASES)


@pytest.mark.parametrize("case", CASES)
def test_trainings_with_and_without_copies_are_the_same(case: str, answers: Answers) -> None:
    for read, in_place, copied in answers[case]:
        assert read >= 6, "nothing was read where it lies"
        assert fixtures.same(in_place[0], copied[0])
        assert fixtures.same(in_place[1], copied[1])
        assert in_place[2:] == copied[2:] and in_place[2] == 1
