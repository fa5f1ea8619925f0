"""Without rollback, memories are changed where they lie: the same bits in half the room, and no step can be dropped."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.engine import Lockstep, Plan, Session, build, default_rules, memory
from gradwire.engine.chorus import Chorus
from gradwire.engine.drive import Conversation
from spawn import run_ranks

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


def sessions_of(plan: Plan, rollback: bool) -> list[Session]:
    return [Session(plan, rank, WORLD, 0, torch.device("cpu"), rollback) for rank in range(WORLD)]


def gradients(step: int, lacking: str = "") -> list[dict[str, Tensor | None]]:
    draw = torch.Generator().manual_seed(step)
    shapes = [(name, shape) for _ in range(WORLD) for name, shape in SHAPES.items()]
    drawn = [(name, None if name == lacking else torch.randn(shape, generator=draw)) for name, shape in shapes]
    return [dict(drawn[i : i + len(SHAPES)]) for i in range(0, len(drawn), len(SHAPES))]


def step_of(sessions: list[Session], grads: list[dict[str, Tensor | None]], unison: bool = False) -> list[Tensor]:
    """What a step hands out and leaves behind."""
    group = Lockstep(WORLD)
    if unison:
        verdicts = [Chorus(sessions, group).step(grads)] * WORLD
    else:
        verdicts = group.drive([one.run(grad) for one, grad in zip(sessions, grads, strict=True)])
    return [x.clone() for verdict in verdicts for x in verdict.updates.values()] + [
        memory[name].clone()
        for one in sessions
        for lane, memory in zip(one.plan.lanes, one.memories, strict=True)
        for name in lane.slots(WORLD)
    ]


def places(one: Session) -> list[int]:
    """Where what feedback remembers lies."""
    lanes = zip(one.plan.lanes, one.memories, strict=True)
    return [memory[name].data_ptr() for lane, memory in lanes for name in lane.feedback.memories]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("how", HOWS, ids=lambda how: f"{how[0]} {how[1]} {how[2]}")
def test_the_same_bits(how: tuple[str, str | None, str | None], ahead: bool) -> None:
    plan = build(SHAPES, default_rules(*how, bundle=None), WORLD, launch_bytes=4 * 7000)
    assert len(plan.launches) == 2
    two, one = sessions_of(plan, rollback=True), sessions_of(plan, rollback=False)
    at = [places(mine) for mine in one]
    assert all(at)
    for number in range(4):
        for mine in (*two, *one):
            mine.ahead = ahead
        known, found = step_of(two, gradients(number)), step_of(one, gradients(number))
        assert all(map(torch.equal, found, known))
    assert ([places(mine) for mine in one] == at) == (how in FUSED)


@pytest.mark.parametrize("how", FUSED, ids=lambda how: f"{how[0]} {how[1]} {how[2]}")
def test_the_same_bits_in_unison(how: tuple[str, str | None, str | None]) -> None:
    plan = build(SHAPES, default_rules(*how), WORLD)
    two, one = sessions_of(plan, rollback=True), sessions_of(plan, rollback=False)
    for number in range(3):
        known, found = step_of(two, gradients(number), unison=True), step_of(one, gradients(number), unison=True)
        assert all(map(torch.equal, found, known))


@pytest.mark.parametrize("unison", [False, True])
def test_a_bad_gradient_is_an_error(unison: bool) -> None:
    sessions = sessions_of(build(SHAPES, default_rules("topk(0.01)"), WORLD), rollback=False)
    step_of(sessions, gradients(0), unison)
    grads = gradients(1)
    grads[1]["a.weight"][3, 4] = torch.inf  # type: ignore[index]
    for again in (grads, gradients(2)):  # whoever goes on all the same is told again
        with pytest.raises(RuntimeError, match="not finite, and memories had been changed already"):
            step_of(sessions, again, unison)
    with pytest.raises(RuntimeError, match="go back to the last checkpoint"):
        memory.save(sessions[0], "")
    for one in sessions:
        one.begin_anew()
    step_of(sessions, gradients(2), unison)


def test_a_bad_gradient_is_an_error_in_hindsight() -> None:
    sessions = sessions_of(build(SHAPES, default_rules("topk(0.01)"), WORLD), rollback=False)
    for one in sessions:
        one.ahead = True
    grads = gradients(0)
    grads[1]["a.weight"][3, 4] = torch.inf  # type: ignore[index]
    left = step_of(sessions, grads)
    assert all(bool(torch.isfinite(x).all()) for x in left)
    assert not any(bool(x.any()) for x in left[: WORLD * len(SHAPES)])  # what was agreed on is void
    with pytest.raises(RuntimeError, match="not finite, and memories had been changed already"):
        memory.save(sessions[0], "topk(0.01)")  # nobody could tell later that it was spoiled
    with pytest.raises(RuntimeError, match="not finite, and memories had been changed already"):
        step_of(sessions, gradients(1))
    for one in sessions:
        one.begin_anew()
    step_of(sessions, gradients(2))


def test_a_parameter_that_nobody_uses_is_an_error() -> None:
    sessions = sessions_of(build(SHAPES, default_rules("topk(0.01)"), WORLD), rollback=False)
    with pytest.raises(RuntimeError, match=r"no rank had a gradient of 'b\.weight'.*rollback=True"):
        step_of(sessions, gradients(0, lacking="b.weight"))


def complaint(conversation: Conversation[Any]) -> Conversation[str]:
    try:
        yield from conversation
    except RuntimeError as wrong:
        return str(wrong)
    return ""


def test_all_ranks_of_a_host_learn_of_a_parameter_that_nobody_uses() -> None:
    models = [nn.Sequential(nn.Linear(40, 50), nn.Linear(50, 60), nn.Linear(60, 5, bias=False)) for _ in range(4)]
    workers = gradwire.lockstep(models, "topk(0.01)", across=[[0, 1], [2, 3]], rollback=False)
    for model in models:
        model[1](model[0](torch.ones(2, 40))).square().mean().backward()
    said = workers.group.drive([complaint(wire.session.run(wire.grads())) for wire in workers.wires])
    assert all("no rank had a gradient of '2.weight'" in one for one in said)


@pytest.mark.parametrize("spec", ["fp32", "qsgd", "powersgd(2)"])
def test_what_no_kernel_changes_is_dropped_as_ever(spec: str) -> None:
    sessions = sessions_of(build(SHAPES, default_rules(spec, "none"), WORLD), rollback=False)
    step_of(sessions, gradients(0, lacking="b.weight"))
    grads = gradients(1)
    grads[1]["a.weight"][3, 4] = torch.inf  # type: ignore[index]
    step_of(sessions, grads)
    assert [one.skipped for one in sessions] == [1] * WORLD


def train(rank: int, hooked: bool, rollback: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
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
    assert any("spare residual" in memory for memory in wire.session.memories) == rollback
    return [p.detach() for p in model.parameters()], wire.state_dict()


def both(rank: int, world: int) -> None:
    for hooked in (False, True):
        known, found = train(rank, hooked, rollback=True), train(rank, hooked, rollback=False)
        assert all(map(torch.equal, found[0], known[0]))
        assert all(torch.equal(found[1][name], known[1][name]) for name in known[1])


def test_gradients_where_they_lie() -> None:
    pytest.importorskip("numba")
    run_ranks(both, 2)


def test_a_scaler_asks_beforehand() -> None:
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
