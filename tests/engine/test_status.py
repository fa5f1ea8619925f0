"""The status of a step: read at once, or left on the device, which then undoes a bad step by itself."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from fake_cuda_graph import FakeCudaGraph, FakeCudaGraphs, largest, zero_nonfinite
from gradwire.codecs import Codec, decoding
from gradwire.comm.backend import CountingBackend, SingleBackend
from gradwire.comm.collectives import Collective
from gradwire.core import CommGenerator, deferred_checks
from gradwire.core.deferred_checks import check, defer_checks
from gradwire.core.payload import CorruptMessageError, Payload
from gradwire.core.requests import Gather, Request, SendRecv, Sum
from gradwire.engine import Engine, Lockstep, Plan, build, checkpoint, default_rules, encoders, status
from gradwire.engine.cuda_graphs import EAGER_STEPS, StepExecutor
from gradwire.engine.drive import Clock, RoundGenerator
from gradwire.engine.lockstep import move
from gradwire.engine.overflow import SkippedSteps
from gradwire.engine.status import ALL_MISSING, CORRUPT, MISSING, NONFINITE, UNSUPPORTED
from gradwire.exchanges import AllGather
from gradwire.exchanges.exchange import Aggregate, CommContext, Message
from gradwire.kernels import dispatch, fused

CPU = torch.device("cpu")
WORLD = 3
SHAPES = {"a.weight": (64, 300), "a.bias": (64,), "b.weight": (100, 64), "empty": (0, 4), "b.bias": (10,)}
HOWS = [
    ("topk(0.01) | int32", None, None),
    ("topk(0.05) | sign | int32", "residual(decay=0.9)", "two_way"),
    ("dgc(0.01, indices=int32)", None, None),
    ("sign", None, "allgather"),
    ("sign", None, "majority"),
    ("sign", "ef21", None),  # whose update is one of its memories
    ("int4", "residual", "two_way"),
    ("qsgd", None, None),
    ("terngrad", "none", None),
    ("randomk(0.1)", None, None),  # whose captures fail
    ("powersgd(2)", None, None),
    ("topk(0.01) | int32", None, "noop"),
    ("topk(0.01) | int32", None, "delayed"),  # which keeps the mean, and is never captured
]
STEPS = 10
BAD = {2: ("b.weight", torch.inf), 4: ("a.bias", torch.nan), 7: ("b.weight", torch.nan), 8: ("a.weight", torch.inf)}


@pytest.fixture
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused encoders by their definitions, and nothing reads data: what is captured must not depend on it."""

    monkeypatch.setattr(dispatch, "faster", lambda device: {})
    monkeypatch.setattr(fused, "top", largest)
    monkeypatch.setattr(encoders, "zero_nonfinite", zero_nonfinite)


class FailingGraph(FakeCudaGraph):
    """Fails at the end of every capture, as CUDA does where something has read from the device."""

    @contextmanager
    def capturing(self) -> Iterator[None]:
        yield
        raise RuntimeError("operation not permitted when stream is capturing")


class ThreadedGroup:
    """Ranks that are threads of this process."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(WORLD, timeout=100)
        self.collectives: list[Any] = [None] * WORLD


class ThreadedBackend(CountingBackend):
    """Carries out collectives among threads."""

    world = WORLD
    stream_ordered = True

    def __init__(self, group: ThreadedGroup, rank: int) -> None:
        super().__init__()
        self.group, self.rank = group, rank

    def move(self, collective: Collective, out: Tensor | None = None) -> Tensor:
        self.group.collectives[self.rank] = collective
        self.group.barrier.wait()
        result = move(self.group.collectives)[self.rank].clone()
        self.group.barrier.wait()
        return result if out is None else out.copy_(result)


def make_engines(plan: Plan) -> list[Engine]:
    return [Engine(plan, rank, WORLD, 0, CPU) for rank in range(WORLD)]


def gradients(step: int) -> list[dict[str, Tensor]]:
    """Of all ranks."""
    draw = torch.Generator().manual_seed(step)
    grads = [{name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()} for _ in range(WORLD)]
    if step in BAD:
        name, value = BAD[step]
        grads[1][name].view(-1)[-1] = value
    return grads


def left_behind(engine: Engine, grads: dict[str, Tensor]) -> list[Tensor]:
    """The updates of a step, and the state after it."""
    states = zip(engine.plan.lanes, engine.states, strict=True)
    memories = [state.tensors[name].clone() for lane, state in states for name in lane.state_specs(WORLD)]
    return [*(grads[name].clone() for name in SHAPES), *memories]


def in_lockstep(engines: list[Engine], group: Lockstep) -> list[list[Tensor]]:
    """By rank: everything that some steps leave behind, whose status is read at once."""
    left: list[list[Tensor]] = [[] for _ in engines]
    for step in range(STEPS):
        grads = gradients(step)
        group.drive([engine.run(mine) for engine, mine in zip(engines, grads, strict=True)])
        for engine, mine, into in zip(engines, grads, left, strict=True):
            into += left_behind(engine, mine)
    return left


def captured(
    engine: Engine, group: ThreadedGroup, graphs: Callable[[], FakeCudaGraph]
) -> tuple[list[Tensor], list[int]]:
    """The same of one rank whose status stays on the device; and how many captures each bucket has."""
    executor = StepExecutor(engine, ThreadedBackend(group, engine.rank), Clock(), graphs)
    grads = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    left: list[Tensor] = []
    for step in range(STEPS):
        for name, x in gradients(step)[engine.rank].items():
            grads[name].copy_(x)
        executor.run(dict(grads), complete=True)
        left += left_behind(engine, grads)
    return left, [len(bucket.captures) for bucket in executor._buckets]


@pytest.mark.parametrize("how", HOWS, ids=lambda how: f"{how[0]} {how[1]} {how[2]}")
@pytest.mark.usefixtures("as_on_a_device")
def test_a_status_left_on_the_device_equals_one_read_at_once(how: tuple[str, str | None, str | None]) -> None:
    plan = build(SHAPES, default_rules(*how), WORLD, bucket_bytes=4 * 7000)
    assert len(plan.buckets) == 2
    reading, leaving = make_engines(plan), make_engines(plan.with_fixed_length())
    known = in_lockstep(reading, Lockstep(WORLD))
    group, fails = ThreadedGroup(), how[0].startswith("randomk")
    with ThreadPoolExecutor(WORLD) as pool:
        graphs = [FailingGraph if fails else FakeCudaGraphs() for _ in leaving]
        tasks = [pool.submit(captured, engine, group, make) for engine, make in zip(leaving, graphs, strict=True)]
        found = [task.result() for task in tasks]
    for (left, captures), expected in zip(found, known, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(left, expected, strict=True))
        assert all(captures) == (how[2] != "delayed" and not fails)
    local_only = how[2] == "noop"  # then no rank knows of another's status
    for mine, other in zip(leaving, reading, strict=True):
        assert mine.step == other.step == STEPS
        assert mine.skipped == other.skipped == (len(BAD) if not local_only or mine.rank == 1 else 0)


@pytest.mark.parametrize("how", [("topk(0.01)",), ("topk(0.05) | fp16",), ("dgc(0.01)",)], ids=str)
def test_messages_of_fixed_length_lead_to_the_same(how: tuple[str]) -> None:
    plan = build(SHAPES, default_rules(*how), WORLD)
    engines, varying, fixed = make_engines(plan.with_fixed_length()), Lockstep(WORLD), Lockstep(WORLD)
    known, found = in_lockstep(make_engines(plan), varying), in_lockstep(engines, fixed)
    for mine, expected in zip(found, known, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(mine, expected, strict=True))
    # There is no round to agree on lengths, and all of a message's space is counted.
    assert fixed.traffic[0].collectives < varying.traffic[0].collectives
    assert fixed.traffic[0].sent > varying.traffic[0].sent
    (lane,) = [lane for lane in plan.with_fixed_length().lanes if lane.label == "*"]
    codec, _ = lane.at(0)
    assert codec.traits.fixed and engines[0].accounting.encoded["*"] == STEPS * codec.size(lane.units)


def lone_executor(rollback: bool = True) -> StepExecutor:
    plan = build(SHAPES, default_rules("topk(0.01) | int32"), 1)
    return StepExecutor(Engine(plan, 0, 1, 0, CPU, rollback), SingleBackend(), Clock(), FakeCudaGraphs())


def lone_step(executor: StepExecutor, grads: dict[str, Tensor], step: int) -> None:
    """A step of a world of one; its last bucket's status stays on the device, once it is captured."""
    draw = torch.Generator().manual_seed(step)
    for x in grads.values():
        x.copy_(torch.randn(x.shape, generator=draw))
    executor.run(dict(grads), complete=True)


@pytest.mark.usefixtures("as_on_a_device")
def test_a_carried_error_is_not_captured() -> None:
    """It is used up by one step."""
    executor = lone_executor()
    grads = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    inner = executor.engine.unwrapped
    for step in range(EAGER_STEPS):
        lone_step(executor, grads, step)
    for lane, state in zip(inner.plan.lanes, inner.states, strict=True):
        state.carried_error = torch.ones(lane.units.total)
    lone_step(executor, grads, EAGER_STEPS)
    assert not any(bucket.captures for bucket in executor._buckets)
    assert all(state.carried_error is None for state in inner.states)
    lone_step(executor, grads, EAGER_STEPS + 1)
    assert all(bucket.captures for bucket in executor._buckets)


@pytest.mark.usefixtures("as_on_a_device")
def test_without_rollback_a_bad_gradient_is_an_error_one_step_later() -> None:
    executor = lone_executor(rollback=False)
    inner = executor.engine.unwrapped
    grads = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for step in range(EAGER_STEPS + 2):
        lone_step(executor, grads, step)
    for x in grads.values():
        x.fill_(1.0)
    grads["a.weight"][3, 4] = torch.inf
    executor.run(dict(grads), complete=True)
    assert not any(bool(x.any()) for x in grads.values())  # the update is void
    with pytest.raises(RuntimeError, match="rollback=False"):
        checkpoint.save(inner, "topk(0.01)")  # no later reader could tell that the state is not valid
    with pytest.raises(RuntimeError, match=r"not finite.*rollback=False.*checkpoint"):
        lone_step(executor, grads, 20)
    inner.skipped_steps.restart(0)
    assert inner.skipped == 0
    lone_step(executor, grads, 21)
    assert all(bool(torch.isfinite(x).all()) for state in inner.states for x in state.tensors.values())


def test_checks_are_deferred_only_on_other_devices() -> None:
    fine, wrong = torch.tensor(False), torch.tensor(True)
    elsewhere = torch.tensor(True, device="meta")
    assert check(fine, "no")
    with defer_checks() as noted:
        assert not check(elsewhere, "cannot be seen from here")
        with pytest.raises(CorruptMessageError, match="not so"):
            check(wrong, "not so")
    assert noted == [elsewhere]


def count(steps: SkippedSteps, *statuses: int) -> bool:
    """Count a step whose buckets have these statuses; whether it is skipped."""
    skipped = steps.count_on_device_([torch.tensor(status, dtype=torch.uint8) for status in statuses])
    steps.poll()
    return bool(skipped)


def test_a_deferred_status_counts_at_once_and_raises_later() -> None:
    steps = SkippedSteps(CPU)
    assert steps.count == 0
    assert count(steps, 0, NONFINITE) and not count(steps, 0, 0)
    assert steps.count == 1
    assert count(steps, CORRUPT, 0)
    with pytest.raises(CorruptMessageError, match="earlier step"):
        count(steps, 0, 0)


def test_a_step_that_cannot_be_dropped_is_an_error_until_the_state_is_replaced() -> None:
    steps = SkippedSteps(CPU, rollback=False)
    steps.synchronize()
    count(steps, NONFINITE)
    with pytest.raises(RuntimeError, match="rollback=False"):
        steps.synchronize()
    with pytest.raises(RuntimeError, match="rollback=False"):
        steps.poll()
    steps.restart(0)
    steps.synchronize()
    steps.poll()


# -- how a status travels ----------------------------------------------------------------------------------------------

REQUESTS: dict[str, Request] = {
    "sum": Sum(torch.ones(4)),
    "16-bit sum": Sum(torch.ones(4, dtype=torch.float16)),
    "gather": Gather(Payload(torch.ones(4, dtype=torch.uint8)), 4),
    "peers": SendRecv(
        {r: Payload(torch.ones(4, dtype=torch.uint8)) for r in range(WORLD)}, dict.fromkeys(range(WORLD), 4)
    ),
}


def rounds_of(request: Request) -> RoundGenerator[Any]:
    (answer,) = yield [request]
    return answer


@pytest.mark.parametrize("kind", REQUESTS)
@pytest.mark.parametrize("found", [0, NONFINITE, MISSING, UNSUPPORTED, CORRUPT])
def test_all_ranks_learn_the_status_of_one(kind: str, found: int) -> None:
    locals_ = [
        torch.tensor([found if rank == 1 and found != NONFINITE else 0], dtype=torch.uint8) for rank in range(WORLD)
    ]
    flags = [[torch.tensor(False), torch.tensor(rank == 1 and found == NONFINITE)] for rank in range(WORLD)]
    group = Lockstep(WORLD)
    results = group.drive(
        [
            status.with_status(rounds_of(REQUESTS[kind]), local, own, WORLD)
            for local, own in zip(locals_, flags, strict=True)
        ]
    )
    for answer, known in results:
        assert known is not None and status.read([known]) == found
        assert isinstance(answer, Tensor) == isinstance(REQUESTS[kind], Sum)
    assert group.traffic[0].collectives == 1, "the status travels with the first round"


@pytest.mark.parametrize("kind", REQUESTS)
@pytest.mark.parametrize("lacking", range(1, WORLD + 1))
def test_all_ranks_learn_whether_all_of_them_lack_gradients(kind: str, lacking: int) -> None:
    own = [torch.tensor([MISSING if rank < lacking else 0], dtype=torch.uint8) for rank in range(WORLD)]
    results = Lockstep(WORLD).drive([status.with_status(rounds_of(REQUESTS[kind]), x, [], WORLD) for x in own])
    expected = MISSING | ALL_MISSING if lacking == WORLD else MISSING
    assert [status.read([known]) for _, known in results if known is not None] == [expected] * WORLD


def test_more_ranks_than_a_sum_can_count_are_taken_to_lack_gradients_all() -> None:
    few, many = (status.status_in(torch.tensor([2.0], dtype=torch.bfloat16), world) for world in (256, 257))
    assert (int(few), int(many)) == (MISSING, MISSING | ALL_MISSING)


def test_gradients_that_others_lack_skip_no_step() -> None:
    steps = SkippedSteps(CPU)
    assert not count(steps, 0, MISSING) and not count(steps, MISSING | ALL_MISSING)
    assert count(steps, MISSING | NONFINITE)
    assert steps.count == 1


def test_a_bucket_without_a_round_has_no_status() -> None:
    def silent() -> RoundGenerator[str]:
        yield from ()
        return "done"

    local = torch.zeros(1, dtype=torch.uint8)
    assert Lockstep(1).drive([status.with_status(silent(), local, [], 1)]) == [("done", None)]


def test_a_corrupt_message_is_forgotten_with_the_state() -> None:
    steps = SkippedSteps(CPU)
    for _ in range(2):
        count(steps, CORRUPT)
        for call in (steps.poll, steps.assert_valid, steps.synchronize):  # once raised, it is raised again
            with pytest.raises(CorruptMessageError):
                call()
        steps.restart(0)
        steps.poll()


# -- a corrupt message -------------------------------------------------------------------------------------------------

CORRUPT_CASES: dict[str, tuple[str, str | None, bool]] = {  # spec, exchange, captured
    "all-gather": ("topk(0.01) | int32", None, False),
    "first leg": ("topk(0.05) | int32", "two_way", False),
    "variable length": ("topk(0.01)", None, False),
    "captured": ("topk(0.01) | int32", None, True),
}
DAMAGED = EAGER_STEPS + 2  # the step in which a message is damaged


class DamagingBackend(ThreadedBackend):
    """Damages the first bytes that it receives."""

    damages = False

    def move(self, collective: Collective, out: Tensor | None = None) -> Tensor:
        result = super().move(collective, out)
        if self.damages and result.dtype == torch.uint8:
            result.view(-1)[:8] = 255
        return result


def check_as_on_a_device(wrong: Tensor, error: str) -> bool:
    deferred = deferred_checks._deferred.get()
    if deferred is not None:
        deferred.append(wrong)
    return deferred is None


def until_corrupt(engine: Engine, group: ThreadedGroup, captured: bool) -> tuple[int, str]:
    """The step in which a rank raises an error, and the error; the last rank receives a damaged message."""
    backend = DamagingBackend(group, engine.rank)
    executor = StepExecutor(engine, backend, Clock(), FakeCudaGraphs() if captured else None)
    grads = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for step in range(DAMAGED + 4):
        for name, x in gradients(step + 100)[engine.rank].items():
            grads[name].copy_(x)
        backend.damages = engine.rank == WORLD - 1 and step == DAMAGED
        try:
            executor.run(dict(grads), complete=True)
        except CorruptMessageError as error:
            return step, str(error)
    return -1, ""


@pytest.mark.parametrize("case", CORRUPT_CASES)
def test_all_ranks_refuse_a_corrupt_message_of_one_in_the_same_step(
    case: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    spec, exchange, captured = CORRUPT_CASES[case]
    if captured:
        request.getfixturevalue("as_on_a_device")
        monkeypatch.setattr(decoding, "check", check_as_on_a_device)
    plan = build(SHAPES, default_rules(spec, None, exchange, bundle=None), WORLD)
    engines, group = make_engines(plan), ThreadedGroup()
    with ThreadPoolExecutor(WORLD) as pool:
        outcomes = [task.result() for task in [pool.submit(until_corrupt, e, group, captured) for e in engines]]
    late = 2 if captured else 1  # a status that stays on the device is read one step later
    assert [step for step, _ in outcomes] == [DAMAGED + late] * WORLD, outcomes
    for engine in engines:
        with pytest.raises(CorruptMessageError):
            checkpoint.save(engine, spec)
        engine.skipped_steps.restart(0)
        checkpoint.save(engine, spec)


class Everywhere(AllGather):
    """Asks for more ranks than those that have the lane."""

    def run(self, message: Message, codec: Codec, context: CommContext) -> CommGenerator[Aggregate]:
        assert isinstance(message.content, Payload)
        yield Gather(message.content, scope="world")
        raise AssertionError("the request was answered")


def test_an_exchange_reaches_no_other_ranks_than_those_of_its_lane() -> None:
    plan = build(SHAPES, default_rules("int4", None, Everywhere()), WORLD)
    engines = [Engine(plan, rank, WORLD, 0, CPU) for rank in range(WORLD)]
    grads = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    with pytest.raises(ValueError, match=r"yields a Gather with scope='world', .*; leave scope= out"):
        Lockstep(WORLD).drive([engine.run(grads) for engine in engines])
