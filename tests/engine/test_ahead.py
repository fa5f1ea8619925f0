"""A session that runs ahead of its device, and looks at nothing, leaves behind what one leaves that looks."""

import pytest
import torch
from torch import Tensor

from gradwire.core.deferred_checks import refuse, unseen
from gradwire.core.payload import CorruptMessageError
from gradwire.engine import Lockstep, Plan, Session, build, default_rules
from gradwire.engine.hindsight import Hindsight

WORLD = 3
SHAPES = {"a.weight": (64, 300), "a.bias": (64,), "b.weight": (100, 64), "empty": (0, 4), "b.bias": (10,)}
HOWS = [
    ("topk(0.01)", None, None),
    ("topk(0.05) | sign | int32", "residual(decay=0.9)", "two_way"),
    ("dgc(0.01)", None, None),
    ("sign", None, "allgather"),
    ("sign", None, "majority"),
    ("sign", "ef21", None),  # whose update is one of its memories
    ("int4", "residual", "two_way"),
    ("qsgd", None, None),
    ("terngrad", "none", None),
    ("randomk(0.1)", None, None),
    ("powersgd(2)", None, None),
    ("topk(0.01)", None, "noop"),
    ("topk(0.01)", None, "delayed"),  # which keeps the mean
]
BAD = {2: ("b.weight", torch.inf), 4: ("a.bias", torch.nan)}  # by step; in the first launch, and in the last


def steps(plan: Plan, ahead: bool, donated: bool = False) -> tuple[list[Tensor], list[Session], Lockstep]:
    """Everything that six steps hand out and leave behind, two of which are dropped."""
    sessions = [Session(plan, rank, WORLD, 0, torch.device("cpu")) for rank in range(WORLD)]
    group = Lockstep(WORLD)
    left: list[Tensor] = []
    for step in range(6):
        draw = torch.Generator().manual_seed(step)
        grads = [{name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()} for _ in sessions]
        if step in BAD:
            name, value = BAD[step]
            grads[1][name].view(-1)[-1] = value
        for session in sessions:
            session.ahead = ahead
            if donated:
                session.donate()
        verdicts = group.drive([s.run(grad) for s, grad in zip(sessions, grads, strict=True)])
        for verdict, mine in zip(verdicts, grads, strict=True):
            left += [verdict.updates[name].clone() for name in SHAPES]
            assert not donated or all(verdict.updates[name] is mine[name] for name in SHAPES)
        for session in sessions:
            for lane, memory in zip(plan.lanes, session.memories, strict=True):
                left += [memory[name].clone() for name in lane.slots(WORLD)]
    return left, sessions, group


@pytest.mark.parametrize("how", HOWS, ids=lambda how: f"{how[0]} {how[1]} {how[2]}")
def test_nobody_can_tell_who_looked(how: tuple[str, str | None, str | None]) -> None:
    plan = build(SHAPES, default_rules(*how), WORLD, launch_bytes=4 * 7000)
    assert len(plan.launches) == 2
    looking, seers, _ = steps(plan, ahead=False)
    trusting, believers, _ = steps(plan, ahead=True)
    for mine, known in zip(trusting, looking, strict=True):
        assert torch.equal(mine, known)
    at_home, _, _ = steps(plan, ahead=True, donated=True)  # updates are written over gradients, launch by launch
    for mine, known in zip(at_home, looking, strict=True):
        assert torch.equal(mine, known)
    silent = how[2] == "noop"  # then nobody hears of another's trouble
    for seer, believer in zip(seers, believers, strict=True):
        assert believer.step == seer.step == 6
        assert believer.skipped == seer.skipped == (2 if not silent or seer.rank == 1 else 0)


@pytest.mark.parametrize("how", [("topk(0.01)",), ("topk(0.05) | fp16",), ("dgc(0.01)",)], ids=str)
def test_messages_of_known_length_say_the_same(how: tuple[str]) -> None:
    plan = build(SHAPES, default_rules(*how), WORLD)
    trimmed, _, account = steps(plan, ahead=False)
    steady, sessions, group = steps(plan.steady(), ahead=True)
    for mine, known in zip(steady, trimmed, strict=True):
        assert torch.equal(mine, known)
    # No round to agree on lengths; and all of the room is on the account.
    assert group.traffic[0].collectives < account.traffic[0].collectives
    assert group.traffic[0].sent > account.traffic[0].sent
    (lane,) = [lane for lane in plan.steady().lanes if lane.label == "*"]
    codec, _ = lane.at(0)
    assert codec.traits.fixed and sessions[0].said["*"] == 6 * codec.size(lane.units)


def test_what_cannot_be_put_back_is_looked_at() -> None:
    plan = build(SHAPES, default_rules("topk(0.01)"), 1)
    session = Session(plan, 0, 1, 0, torch.device("cpu"))
    assert session.may_lead
    session.memories[0]["owed"] = torch.ones(plan.lanes[0].units.total)
    assert not session.may_lead


def test_doubts_are_noted_only_where_nobody_can_look() -> None:
    fine, wrong = torch.tensor(False), torch.tensor(True)
    elsewhere = torch.tensor(True, device="meta")
    assert refuse(fine, "no")
    with unseen() as noted:
        assert not refuse(elsewhere, "cannot be seen from here")
        with pytest.raises(CorruptMessageError, match="not so"):
            refuse(wrong, "not so")
    assert noted == [elsewhere]


def note(known: Hindsight, dropped: Tensor, doubts: list[Tensor]) -> None:
    known.count_(dropped, doubts)
    known.look()


def test_hindsight_counts_and_complains_late() -> None:
    known = Hindsight(torch.device("cpu"))
    assert known.dropped == 0
    note(known, torch.tensor(True), [])
    note(known, torch.tensor(False), [torch.tensor(False), torch.tensor(True)])
    assert known.dropped == 1
    with pytest.raises(CorruptMessageError, match="earlier step"):
        note(known, torch.tensor(True), [])
