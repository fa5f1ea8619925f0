"""Steps that are recorded and repeated compute what steps compute that are spoken, bit for bit."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from fake_cuda_graph import WrittenGraph, WrittenGraphs, largest
from gradwire.comm.single import SingleBackend
from gradwire.core.graph_refs import keep, keeping
from gradwire.core.keys import Drawn, StillKey
from gradwire.core.payload import Payload
from gradwire.core.requests import Gather, Sum
from gradwire.core.segments import on
from gradwire.engine import Plan, Rule, Session, build, default_rules, memory, recording
from gradwire.engine import session as sessions
from gradwire.engine.drive import Clock, Conversation, drive
from gradwire.engine.recording import Recorder, Tape, Unrecordable, hold, in_collectives, record
from gradwire.engine.session import Heard, Places
from gradwire.kernels import dispatch, fused, philox

SHAPES = {"a.weight": (40, 30), "a.bias": (40,), "b.weight": (20, 40), "b.bias": (10,)}
HOWS = [
    ("topk(0.05) | int32", "residual(decay=0.9)", None),
    ("topk(0.05) | int32", "momentum_correction", None),
    ("topk(0.05) | sign | int32", None, None),
    ("sign", None, "allgather"),  # a dense lane
    ("sign", "ef21", None),  # whose update is one of its memories
    ("int4", "residual", "two_way"),
    ("fp16", "residual", None),
    ("powersgd(2)", None, None),  # which draws its first bases, but those only once
]
IN_PLACE = [HOWS[1], HOWS[2], HOWS[3], HOWS[5]]
BAD = {8: "b.weight", 11: "a.bias"}  # steps that are dropped, one with either take
STEPS = 14


@pytest.fixture(autouse=True)
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused lanes by their definitions, and nobody looks at data: what is written down must not depend on it."""
    monkeypatch.setattr(dispatch, "faster", lambda device: {})
    monkeypatch.setattr(fused, "_largest", largest)
    monkeypatch.setattr(sessions, "censored", censored)


def censored(flat: Tensor) -> tuple[Tensor, Tensor]:
    fine = torch.isfinite(flat).all()
    return torch.where(fine, flat, 0.0), ~fine


class Rank:
    """A rank whose gradients always lie in the same places."""

    def __init__(self, plan: Plan, graphs: Callable[[], WrittenGraph] | None, rollback: bool = True) -> None:
        self.session = Session(plan, 0, 1, 0, torch.device("cpu"), rollback)
        self.link, self.clock = SingleBackend(), Clock()
        self.buffer = torch.zeros(sum(lane.units.total for lane in plan.lanes))
        parts = iter(self.buffer.split([n for lane in plan.lanes for n in lane.tensors.lengths]))
        self.views = {name: next(parts) for lane in plan.lanes for name in lane.tensors.names}
        lanes = [[[self.views[name] for name in lane.tensors.names] for lane in launch] for launch in plan.launches]
        self.places = [Places(one, True) for one in lanes]
        self.recorder = Recorder(self.session, self.link, self.clock, self.speak, graphs)

    def speak(self, conversation: Conversation[Heard]) -> Heard:
        return drive(conversation, self.link, self.clock)

    def step(self, number: int) -> list[Tensor]:
        """What a step hands out and leaves behind."""
        draw = torch.Generator().manual_seed(number)
        for name, shape in SHAPES.items():
            self.views[name].copy_(torch.randn(shape, generator=draw).flatten())
        if number in BAD:
            self.views[BAD[number]][-1] = torch.inf
        self.session.ahead = True
        heard = [self.recorder.launch(i, self.views, places) for i, places in enumerate(self.places)]
        self.recorder.conclude(heard, [self.buffer])
        slots = [lane.slots(1) for lane in self.session.plan.lanes]
        memories = zip(self.session.memories, slots, strict=True)
        return [self.buffer.clone(), *(memory[name].clone() for memory, names in memories for name in names)]


def plan_of(how: Sequence[str | None]) -> Plan:
    plan = build(SHAPES, default_rules(*how), 1, launch_bytes=4 * 1000)  # type: ignore[arg-type]
    assert len(plan.launches) == 2
    return plan


def same(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return all(torch.equal(mine, known) for mine, known in zip(left, right, strict=True))


def takes(rank: Rank) -> list[int]:
    return [len(part.takes) for part in rank.recorder._parts]


@pytest.mark.parametrize("how", HOWS, ids=lambda how: f"{how[0]} {how[1]} {how[2]}")
def test_nobody_can_tell_who_repeats(how: tuple[str | None, ...]) -> None:
    plan = plan_of(how)
    speaker, repeater = Rank(plan, None), Rank(plan, WrittenGraphs())
    for number in range(STEPS):
        made = WrittenGraph.made
        assert same(repeater.step(number), speaker.step(number)), number
        assert (WrittenGraph.made > made) == (number in (3, 4)), number  # both takes; then all is repeated
    assert takes(repeater) == [2, 2]
    for rank in (speaker, repeater):
        assert (rank.session.step, rank.session.skipped) == (STEPS, len(BAD))
    assert repeater.session.said == speaker.session.said and repeater.session.meant == speaker.session.meant
    assert repeater.link.traffic == speaker.link.traffic
    assert repeater.clock.encode > 0.0 and repeater.clock.decode > 0.0


def places(rank: Rank) -> list[int]:
    """Where all memories lie, hints among them."""
    return [x.data_ptr() for memory in rank.session.memories for x in memory.values()]


@pytest.mark.parametrize("how", IN_PLACE, ids=lambda how: f"{how[0]} {how[1]} {how[2]}")
def test_memories_that_are_changed_in_place_stay_there(how: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.BAD", {})  # no step can be dropped then
    plan = build(SHAPES, (Rule("fp16", name="b.weight", feedback="residual"), *default_rules(*how)), 1, launch_bytes=4)
    assert {lane.fused for lane in plan.lanes} == {True, False}  # what no kernel changes is moved to where it was
    speaker, repeater = Rank(plan, None), Rank(plan, WrittenGraphs(), rollback=False)
    for number in range(9):
        made, at = WrittenGraph.made, places(repeater)
        assert same(repeater.step(number), speaker.step(number)), number
        assert (WrittenGraph.made > made) == (number == 3), number
        assert number < 3 or places(repeater) == at, number
    assert set(takes(repeater)) == {1} and repeater.session.said == speaker.session.said


def fail_turns(monkeypatch: pytest.MonkeyPatch, doomed: Callable[[int], bool]) -> list[int]:
    """From now on those turns of recordings fail, counted from 1; the list says how many there have been."""
    known, real, turns = recording._next, recording.record, [0]

    def fails(*args: object) -> object:
        turns[0] += 1
        if doomed(turns[0]):
            raise RuntimeError("operation not permitted when stream is capturing")
        return known(*args)  # type: ignore[arg-type]

    def record_badly(*args: object) -> Tape[Heard]:
        with monkeypatch.context() as patch:
            patch.setattr(recording, "_next", fails)
            return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(recording, "record", record_badly)
    return turns


def test_a_recording_in_place_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.BAD", {})
    fail_turns(monkeypatch, lambda turn: turn in (2, 4))  # the first ones have added the gradient to the memories
    plan = plan_of(HOWS[1])
    speaker, repeater = Rank(plan, None), Rank(plan, WrittenGraphs(), rollback=False)
    for number in range(9):
        assert same(repeater.step(number), speaker.step(number)), number
        assert takes(repeater) == [int(number > 6)] * 2, number  # better luck the second time
    assert repeater.link.traffic == speaker.link.traffic


def test_memories_that_cannot_be_copied_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, clone, real = Rank(plan_of(HOWS[1]), WrittenGraphs(), rollback=False), Tensor.clone, Recorder._record

    def full(x: Tensor) -> Tensor:
        if any(x is y for one in rank.session.memories for y in one.values()):
            raise torch.OutOfMemoryError
        return clone(x)

    def record_in_little_room(*about: object) -> Heard:
        with monkeypatch.context() as patch:
            patch.setattr(Tensor, "clone", full)
            return real(*about)  # type: ignore[arg-type]

    monkeypatch.setattr(Recorder, "_record", record_in_little_room)
    for number in range(5):
        rank.step(number)
    assert takes(rank) == [0, 0] and [part.tries for part in rank.recorder._parts] == [3, 3]


def test_memories_that_are_changed_in_place_may_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a checkpoint, after a step that could not be dropped; or by whatever else."""
    monkeypatch.setattr(f"{__name__}.BAD", {6: "b.weight"})
    plan = plan_of(HOWS[1])
    repeater, speaker = Rank(plan, WrittenGraphs(), rollback=False), Rank(plan, None, rollback=False)
    ranks = repeater, speaker
    for number in range(16):
        if number == 5:
            states = [memory.save(rank.session, "") for rank in ranks]
        if number == 7:
            for rank in ranks:
                with pytest.raises(RuntimeError, match="memories had been changed already"):
                    memory.save(rank.session, "")
                with pytest.raises(RuntimeError, match="memories had been changed already"):
                    rank.step(number)
            at = places(repeater)
            for rank, state in zip(ranks, states, strict=True):
                memory.load(rank.session, [state])
            assert set(places(repeater)) < set(at)  # hints are no part of a state
        if number == 11:
            for rank in ranks:
                rank.session.memories = [{n: x * 0.5 for n, x in m.items()} for m in rank.session.memories]
        alike = same(repeater.step(number), speaker.step(number))
        assert alike or number == 6, number  # then anything may be in memories
        assert takes(repeater) == [int(number in (3, 4, 5, 6, 10, 14, 15))] * 2, number


def test_a_spoiled_session_repeats_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.BAD", {})
    rank = Rank(plan_of(HOWS[1]), WrittenGraphs(), rollback=False)
    for number in range(5):
        rank.step(number)
    assert takes(rank) == [1, 1]
    with pytest.raises(RuntimeError, match="memories had been changed already"):
        rank.session.forgive()
    known = [x.clone() for one in rank.session.memories for x in one.values()]
    with pytest.raises(RuntimeError, match="memories had been changed already"):
        rank.step(5)
    assert same([x for one in rank.session.memories for x in one.values()], known)


def test_other_memories_are_recorded_anew() -> None:
    plan = plan_of(HOWS[1])
    speaker, repeater = Rank(plan, None), Rank(plan, WrittenGraphs())
    for number in range(STEPS):
        if number == 7:  # as if a checkpoint had been loaded
            for rank in (speaker, repeater):
                rank.session.memories = [{n: x * 0.5 for n, x in m.items()} for m in rank.session.memories]
        assert same(repeater.step(number), speaker.step(number)), number
        assert takes(repeater) == [[0, 1, 2][min(max(number - (9 if number > 6 else 2), 0), 2)]] * 2, number


def test_another_codec_is_recorded_anew() -> None:
    rules = default_rules({0: "topk(0.1) | int32", 6: "topk(0.05) | int32"}, "residual")
    plan = build(SHAPES, rules, 1)
    speaker, repeater = Rank(plan, None), Rank(plan, WrittenGraphs())
    for number in range(STEPS):
        assert same(repeater.step(number), speaker.step(number)), number
    assert takes(repeater) == [2]


def test_gradients_that_come_elsewhere_are_spoken_first() -> None:
    rank = Rank(plan_of(HOWS[0]), WrittenGraphs())
    for number in range(6):
        rank.step(number)
    rank.recorder.forget()
    rank.step(6)
    assert takes(rank) == [0, 0]


def test_what_is_drawn_is_never_recorded() -> None:
    plan = plan_of(("qsgd", None, None))
    speaker, repeater = Rank(plan, None), Rank(plan, WrittenGraphs())
    for number in range(6):
        assert same(repeater.step(number), speaker.step(number)), number
    assert takes(repeater) == [0, 0] or all(part.tries == 0 for part in repeater.recorder._parts if not part.takes)
    assert repeater.session.said == speaker.session.said
    with pytest.raises(Drawn, match="cannot be recorded"):
        philox.words(StillKey(0, 0, 0).fold("x"), "unit", 4, torch.device("cpu"))


def test_who_cannot_record_goes_on_speaking(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_turns(monkeypatch, lambda turn: turn % 2 == 0)  # when a message has been sent already
    plan = plan_of(HOWS[1])
    speaker, repeater = Rank(plan, None), Rank(plan, WrittenGraphs())
    for number in range(STEPS):
        assert same(repeater.step(number), speaker.step(number)), number
    assert repeater.link.traffic == speaker.link.traffic  # nothing is sent twice
    assert repeater.session.said == speaker.session.said and takes(repeater) == [0, 0]


@pytest.mark.parametrize("last", [3, 4])
def test_who_cannot_record_the_end_finds_gradients_as_they_were(last: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane that has heard all may not write over its gradients while another one still talks."""
    rules = (Rule("int4", name="b.*", exchange="two_way"), *default_rules("topk(0.05) | int32", bundle=None))
    plan = build(SHAPES, rules, 1)
    turns = fail_turns(monkeypatch, lambda turn: turn % last == 0)
    speaker, repeater = Rank(plan, None), Rank(plan, WrittenGraphs())
    for number in range(STEPS):
        assert same(repeater.step(number), speaker.step(number)), number
    assert takes(repeater) == [0] and turns[0] >= last


def test_a_verdict_that_cannot_be_recorded_is_spoken(monkeypatch: pytest.MonkeyPatch) -> None:
    real, tried = recording.record, [0]

    def no_verdicts(talking: object, *about: object) -> Tape[Heard]:
        if getattr(talking, "__name__", "") == "talking":
            tried[0] += 1
            raise Unrecordable([], never=False)
        return real(talking, *about)  # type: ignore[arg-type]

    monkeypatch.setattr(recording, "record", no_verdicts)
    plan = plan_of(HOWS[1])
    speaker, repeater = Rank(plan, None), Rank(plan, WrittenGraphs())
    for number in range(STEPS):
        assert same(repeater.step(number), speaker.step(number)), number
    assert takes(repeater) == [2, 2] and tried == [2]


def test_without_memories_one_take_will_do() -> None:
    plan = plan_of(("sign", "none", "allgather"))
    speaker, repeater = Rank(plan, None), Rank(plan, WrittenGraphs())
    for number in range(STEPS):
        assert same(repeater.step(number), speaker.step(number)), number
    assert takes(repeater) == [1, 1]


@pytest.mark.parametrize(
    ("spec", "dense", "known"),
    [
        ("topk(0.05) | int32", "b.weight", [1, 2]),  # whose one take runs while the other launch has memories to keep
        ("sign", "b.weight", [1, 2]),
        ("sign", "a.bias", [2, 1, 2]),  # and while the first launch waits for the verdict
        ("sign", "b.bias", [1, 2, 2]),
    ],
)
def test_a_launch_of_one_take_writes_over_nothing(spec: str, dense: str, known: list[int]) -> None:
    plan = build(SHAPES, (Rule("fp16", name=dense), *default_rules(spec, "residual")), 1, launch_bytes=4)
    speaker, repeater = Rank(plan, None), Rank(plan, WrittenGraphs())
    for number in range(STEPS):
        assert same(repeater.step(number), speaker.step(number)), number
    assert takes(repeater) == known and repeater.session.skipped == len(BAD)


@pytest.mark.parametrize("name", ["b.weight", "a.weight"])
def test_a_launch_that_is_recorded_anew_alone_is_written_over_by_nobody(name: str) -> None:
    rules = (Rule({0: "int8", 7: "int4"}, name=name, feedback="residual"), *default_rules("sign", "residual"))
    plan = build(SHAPES, rules, 1, launch_bytes=4)
    speaker, repeater = Rank(plan, None), Rank(plan, WrittenGraphs())
    for number in range(STEPS + 4):
        assert same(repeater.step(number), speaker.step(number)), number
    assert takes(repeater) == [2, 2] and repeater.session.skipped == len(BAD)


def test_a_conversation_is_resumed_where_it_could_not_be_recorded() -> None:
    def talk() -> Conversation[Tensor]:
        (first,) = yield [Sum(torch.ones(2))]
        (second,) = yield [Gather(Payload(torch.ones(1, dtype=torch.uint8)), 1)]
        return first + second[0].data

    link = SingleBackend()
    assert hold(in_collectives(talk(), 1), link).tolist() == [2.0, 2.0]
    assert link.traffic.collectives == 2
    assert hold(in_collectives(talk(), 1), link, [torch.full((2,), 5.0)]).tolist() == [6.0, 6.0]
    assert link.traffic.collectives == 3
    tape = record(in_collectives(talk(), 1), link, WrittenGraph)
    assert tape.repeat(link, Clock()).tolist() == [2.0, 2.0] and link.traffic.collectives == 7

    def wrong() -> Conversation[Tensor]:
        yield [Sum(torch.ones(2))]
        raise RuntimeError("no")

    with pytest.raises(Unrecordable) as refused:
        record(in_collectives(wrong(), 1), link, WrittenGraph)
    assert [x.tolist() for x in refused.value.heard] == [[1.0, 1.0]] and not refused.value.never


def test_tables_are_kept() -> None:
    cpu = torch.device("cpu")
    known = on((1, 2, 3), cpu)
    with keeping() as noted:
        assert on((1, 2, 3), cpu) is known
        keep("a plan")
    on((4,), cpu)
    assert len(noted) == 2 and noted[0] is known and noted[1] == "a plan"
