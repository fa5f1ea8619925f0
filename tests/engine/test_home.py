"""A sparse mean goes straight to where gradients lie, if they lie end to end; the bits are those of a vector apart."""

import pytest
import torch
from torch import Tensor

from gradwire.codecs.codec import Entries
from gradwire.engine import Lockstep, Plan, Rule, Session, build, default_rules
from gradwire.kernels import fused

SHAPES = {"a.weight": (64, 300), "a.bias": (64,), "b.weight": (100, 64), "b.bias": (10,), "c.weight": (30, 70)}
RULES = {
    "topk": default_rules("topk(0.01)", bundle=None),
    "dgc": default_rules("dgc(0.01)", bundle=None),
    "composed": default_rules("topk(0.01)", "none", bundle=None),
    "two lanes": (Rule("topk(0.02) | fp16", name="a.*"), *default_rules("topk(0.01)", bundle=None)),
    "a dense lane": default_rules("dgc(0.01)"),
    "more rounds": (Rule("int4", name="b.*", exchange="two_way"), *default_rules("topk(0.01)", bundle=None)),
    "a mean that is no update": (Rule("topk(0.02)", name="a.*", feedback="ef21"), *default_rules("topk(0.01)")),
}
BAD = {2: ("b.weight", torch.inf), 4: ("a.bias", torch.nan)}  # steps that are dropped


def gradients(plan: Plan, step: int, rank: int, joint: bool) -> dict[str, Tensor]:
    """Of one rank; ``joint``: those of a lane end to end, one entry off from where memory is aligned."""
    draw = torch.Generator().manual_seed(10 * step + rank)
    grads = {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}
    if step in BAD and rank == plan.world - 1:
        grads[BAD[step][0]].view(-1)[-1] = BAD[step][1]
    if joint:
        for lane in plan.lanes:
            whole = torch.cat([torch.zeros(1), *(grads[name].flatten() for name in lane.tensors.names)])
            parts = whole[1:].split(lane.tensors.lengths)
            grads |= {n: x.view(SHAPES[n]) for n, x in zip(lane.tensors.names, parts, strict=True)}
    return grads


def steps(plan: Plan, donated: bool, joint: bool = False, rollback: bool = True) -> list[Tensor]:
    """Everything that some steps hand out and leave behind."""
    ranks = [Session(plan, rank, plan.world, 0, torch.device("cpu"), rollback) for rank in range(plan.world)]
    left: list[Tensor] = []
    for step in range(6 if rollback else 2):
        grads = [gradients(plan, step, rank, joint) for rank in range(plan.world)]
        for one in ranks:
            one.ahead = True
            if donated:
                one.donate()
        verdicts = Lockstep(plan.world).drive([one.run(mine) for one, mine in zip(ranks, grads, strict=True)])
        for verdict, mine in zip(verdicts, grads, strict=True):
            assert not donated or all(verdict.updates[name] is mine[name] for name in SHAPES)
            left += [verdict.updates[name].clone() for name in SHAPES]
        left += [
            memory[name].clone()
            for one in ranks
            for lane, memory in zip(plan.lanes, one.memories, strict=True)
            for name in lane.slots(plan.world)
        ]
    assert [one.skipped for one in ranks] == [len(BAD) if rollback else 0] * plan.world
    return left


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("kind", RULES)
def test_the_same_bits(kind: str, world: int) -> None:
    for launch_bytes in (4 * 7000, 2**20):  # two launches, and one
        plan = build(SHAPES, RULES[kind], world, launch_bytes=launch_bytes)
        known = steps(plan, donated=False)
        for joint in (False, True):
            assert all(map(torch.equal, steps(plan, donated=True, joint=joint), known)), joint


@pytest.mark.parametrize("rollback", [True, False])
@pytest.mark.parametrize("world", [1, 3])
def test_no_vector_beside_the_gradients(world: int, rollback: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = build(SHAPES, RULES["dgc"], world, launch_bytes=4 * 7000)
    known = steps(plan, donated=False, rollback=rollback)
    written: list[int] = []

    def write(entries: Entries, out: Tensor) -> Tensor:
        written.append(out.data_ptr())
        fused.scatter_mean_(out, *entries, 0, world)
        return out

    def refused(*about: object) -> Tensor:
        raise AssertionError("a vector of its own, or a copy of one")

    with monkeypatch.context() as patch:
        patch.setattr(Entries, "mean", refused)
        patch.setattr(Entries, "mean_", write)
        apart = steps(plan, donated=True, rollback=rollback)  # over the vector that was encoded, and home from there
        patch.setattr(torch, "_foreach_copy_", refused)
        joint = steps(plan, donated=True, joint=True, rollback=rollback)
    assert all(map(torch.equal, apart, known)) and all(map(torch.equal, joint, known))
    assert len(written) == 2 * world * len(plan.lanes) * (6 if rollback else 2)
    assert all(at % 16 == 4 for at in written[len(written) // 2 :])  # where gradients lie; copies are aligned


def test_gradients_that_are_not_donated_stay_as_they_are() -> None:
    plan = build(SHAPES, RULES["topk"], 1)
    session = Session(plan, 0, 1, 0, torch.device("cpu"))
    session.ahead = True
    grads = gradients(plan, 0, 0, joint=True)
    known = {name: x.clone() for name, x in grads.items()}
    (verdict,) = Lockstep(1).drive([session.run(grads)])
    assert all(torch.equal(grads[name], known[name]) for name in SHAPES)
    assert all(verdict.updates[name].data_ptr() != grads[name].data_ptr() for name in SHAPES)
