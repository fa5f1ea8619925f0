"""Without rollback, the state is changed in place: the same bits in half the memory, and no step can be dropped."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fixtures
import gradwire
from gradwire.comm.backend import SingleBackend
from gradwire.engine import Engine, Lockstep, Plan, Rule, build, checkpoint, default_rules
from gradwire.engine.batched import Batched
from gradwire.engine.drive import Clock, RoundGenerator, execute
from spawn import Answers, cases_fixture

WORLD = 3
SHAPES = {"a.weight": (64, 300), "a.bias": (64,), "b.weight": (100, 64), "empty": (0, 4), "b.bias": (10,)}
HOWS = [
    ("topk(0.01)", None, None),
    ("topk(0.05) | sign | int32", "residual(decay=0.9)", "two_way"),
    ("dgc(0.01)", None, None),
    ("sign", None, "allgather"),
    ("int4", "residual", "two_way"),
    ("qsgd", "residual", None),  # composed: it has new memories at every step
]
FUSED = HOWS[:-1]


def make_engines(plan: Plan, rollback: bool) -> list[Engine]:
    return [Engine(plan, rank, WORLD, 0, torch.device("cpu"), rollback) for rank in range(WORLD)]


def gradients(step: int, lacking: str = "") -> list[dict[str, Tensor | None]]:
    draw = torch.Generator().manual_seed(step)
    shapes = [(name, shape) for _ in range(WORLD) for name, shape in SHAPES.items()]
    drawn = [(name, None if name == lacking else torch.randn(shape, generator=draw)) for name, shape in shapes]
    return [dict(drawn[i : i + len(SHAPES)]) for i in range(0, len(drawn), len(SHAPES))]


def step_of(engines: list[Engine], grads: list[dict[str, Tensor | None]], batched: bool = False) -> list[Tensor]:
    """What a step hands out and leaves behind."""
    group = Lockstep(WORLD)
    if batched:
        batch = Batched(engines, group)
        assert batch.can_run(grads)
        results = [batch.run(grads)] * WORLD
    else:
        results = group.drive([engine.run(mine) for engine, mine in zip(engines, grads, strict=True)])
    return [x.clone() for result in results for x in result.updates.values()] + [
        state.tensors[name].clone()
        for engine in engines
        for lane, state in zip(engine.plan.lanes, engine.states, strict=True)
        for name in lane.state_specs(WORLD)
    ]


def addresses(engine: Engine) -> list[int]:
    """Where the memories of feedback lie."""
    lanes = zip(engine.plan.lanes, engine.states, strict=True)
    return [state.tensors[name].data_ptr() for lane, state in lanes for name in lane.feedback.memories]


def spare_bytes(engine: Engine) -> int:
    """Memory that is kept beside the state, for the next step to write to."""
    found = 0
    for state in engine.states:
        live = {x.untyped_storage().data_ptr() for x in state.tensors.values()}
        spare = {} if state.spare is None else state.spare.tensors
        found += sum(x.nbytes for x in spare.values() if x.untyped_storage().data_ptr() not in live)
    return found


@pytest.mark.parametrize("how", HOWS, ids=lambda how: f"{how[0]} {how[1]} {how[2]}")
def test_in_place_equals_two_generations(how: tuple[str, str | None, str | None]) -> None:
    plan = build(SHAPES, default_rules(*how, bundle=None), WORLD, bucket_bytes=4 * 7000)
    assert len(plan.buckets) == 2
    two, one = make_engines(plan, rollback=True), make_engines(plan, rollback=False)
    before = [addresses(engine) for engine in one]
    assert all(before)
    for number in range(4):
        known, found = step_of(two, gradients(number)), step_of(one, gradients(number))
        assert all(map(torch.equal, found, known))
    assert ([addresses(engine) for engine in one] == before) == (how in FUSED)


@pytest.mark.parametrize("how", HOWS, ids=lambda how: f"{how[0]} {how[1]} {how[2]}")
def test_in_place_keeps_nothing_beside_the_state(how: tuple[str, str | None, str | None]) -> None:
    engines = make_engines(build(SHAPES, default_rules(*how, bundle=None), WORLD), rollback=False)
    for number in range(2):
        step_of(engines, gradients(number))
    assert [spare_bytes(engine) for engine in engines] == [0] * WORLD


@pytest.mark.parametrize("how", FUSED, ids=lambda how: f"{how[0]} {how[1]} {how[2]}")
def test_only_memories_of_feedback_are_kept_twice(how: tuple[str, str | None, str | None]) -> None:
    engines = make_engines(build(SHAPES, default_rules(*how, bundle=None), WORLD), rollback=True)
    for number in range(2):
        step_of(engines, gradients(number))
    for engine in engines:
        lanes = zip(engine.plan.lanes, engine.states, strict=True)
        memories = [state.tensors[name] for lane, state in lanes for name in lane.feedback.memories]
        assert spare_bytes(engine) <= sum(x.nbytes for x in memories)


@pytest.mark.parametrize("how", FUSED, ids=lambda how: f"{how[0]} {how[1]} {how[2]}")
def test_in_place_equals_two_generations_where_ranks_are_batched(how: tuple[str, str | None, str | None]) -> None:
    plan = build(SHAPES, default_rules(*how), WORLD)
    two, one = make_engines(plan, rollback=True), make_engines(plan, rollback=False)
    for number in range(3):
        known, found = step_of(two, gradients(number), batched=True), step_of(one, gradients(number), batched=True)
        assert all(map(torch.equal, found, known))


@pytest.mark.parametrize("batched", [False, True])
def test_a_gradient_that_is_not_finite_is_an_error(batched: bool) -> None:
    engines = make_engines(build(SHAPES, default_rules("topk(0.01)"), WORLD), rollback=False)
    step_of(engines, gradients(0), batched)
    grads = gradients(1)
    grads[1]["a.weight"][3, 4] = torch.inf
    for again in (grads, gradients(2)):  # also for a loop that goes on all the same
        with pytest.raises(RuntimeError, match=r"not finite.*rollback=False.*checkpoint"):
            step_of(engines, again, batched)
    with pytest.raises(RuntimeError, match="rollback=False"):
        checkpoint.save(engines[0], "")
    for engine in engines:
        engine.skipped_steps.restart(0)
    step_of(engines, gradients(2), batched)


def test_a_parameter_without_a_gradient_on_any_rank_is_an_error() -> None:
    engines = make_engines(build(SHAPES, default_rules("topk(0.01)"), WORLD), rollback=False)
    with pytest.raises(RuntimeError, match=r"'b\.weight'.*rollback=True"):
        step_of(engines, gradients(0, lacking="b.weight"))


def error_of(rounds: RoundGenerator[Any]) -> RoundGenerator[str]:
    try:
        yield from rounds
    except RuntimeError as error:
        return str(error)
    return ""


def test_all_ranks_of_a_host_learn_of_a_parameter_without_a_gradient() -> None:
    models = [nn.Sequential(nn.Linear(40, 50), nn.Linear(50, 60), nn.Linear(60, 5, bias=False)) for _ in range(4)]
    workers = gradwire.lockstep(models, "topk(0.01)", across=[[0, 1], [2, 3]], rollback=False)
    for model in models:
        model[1](model[0](torch.ones(2, 40))).square().mean().backward()
    errors = workers.group.drive([error_of(wire.engine.run(wire.grads())) for wire in workers.wires])
    assert all("'2.weight'" in error for error in errors)


@pytest.mark.parametrize("spec", ["fp32", "qsgd", "powersgd(2)"])
def test_composed_steps_are_dropped_all_the_same(spec: str) -> None:
    engines = make_engines(build(SHAPES, default_rules(spec, "none"), WORLD), rollback=False)
    step_of(engines, gradients(0, lacking="b.weight"))
    grads = gradients(1)
    grads[1]["a.weight"][3, 4] = torch.inf
    step_of(engines, grads)
    assert [engine.skipped for engine in engines] == [1] * WORLD


def test_composed_steps_keep_the_momentum_of_a_parameter_without_a_gradient() -> None:
    """A world of one, since ranks of one process share what they decode."""
    shapes, composed = {name: (64,) for name in "abc"}, {"feedback": "common_momentum", "exchange": "two_way"}
    plan = build(shapes, [Rule("topk(0.5)", name="a"), Rule("fp16", name="*", **composed)], 1)
    engine = Engine(plan, 0, 1, 0, torch.device("cpu"), rollback=False)
    at = next(i for i, lane in enumerate(plan.lanes) if lane.feedback.needs_denominator)
    engine.states[at].tensors["denominator"].fill_(0.5)
    place, kept = plan.lanes[at].slices["b"], list[Tensor]()
    for lacks in (False, False, True):
        grads = {name: None if lacks and name == "b" else torch.randn(64) for name in shapes}
        execute(engine.run(grads), SingleBackend(), Clock())
        kept.append(engine.states[at].tensors["momentum"][place].clone())
    assert not torch.equal(kept[0], kept[1]) and torch.equal(kept[1], kept[2])


def train(rank: int, hooked: bool, rollback: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(800, 450), nn.ReLU(), nn.Linear(450, 500))
    outer = DistributedDataParallel(model, gradient_as_bucket_view=True) if hooked else model
    wire = gradwire.compress(outer, "dgc(0.01)", rollback=rollback)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        x = torch.randn(4, 800, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.zero_grad(set_to_none=False)
        outer(x).square().mean().backward()
        if not hooked:
            wire()
        optimizer.step()
    assert (spare_bytes(wire.engine.unwrapped) > 0) == rollback
    return fixtures.tensors(model), wire.state_dict()


def both(rank: int, world: int, hooked: bool) -> tuple[Any, Any]:
    return train(rank, hooked, rollback=True), train(rank, hooked, rollback=False)


answers = cases_fixture(both, 2, {"loop": False, "ddp": True})


@pytest.mark.parametrize("case", ["loop", "ddp"])
def test_trainings_with_and_without_rollback_are_the_same(case: str, answers: Answers) -> None:
    for two, one in answers[case]:
        assert fixtures.same(two[0], one[0])
        assert fixtures.same(two[1], one[1])


def test_a_scaler_checks_gradients_first() -> None:
    model = nn.Linear(300, 40)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    wire = gradwire.compress(model, "topk(0.01)", scaler=scaler, rollback=False)
    for x in (1.0, torch.inf, 1.0):
        optimizer.zero_grad()
        scaler.scale(model(torch.full((2, 300), x)).square().mean()).backward()
        wire()
        scaler.step(optimizer)
        scaler.update()
    assert wire.skipped == 1 and all(bool(torch.isfinite(p).all()) for p in model.parameters())
