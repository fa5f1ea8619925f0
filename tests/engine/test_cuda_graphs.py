"""Steps that are captured and replayed compute what eager steps compute, bit for bit."""

from collections import deque
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from fake_cuda_graph import FakeCudaGraph, FakeCudaGraphs, largest, zero_nonfinite
from gradwire.comm.backend import SingleBackend
from gradwire.core.graph_refs import pin, pin_tables
from gradwire.core.keys import Key, RandomnessInGraph
from gradwire.core.layout import Scattered
from gradwire.core.payload import Payload
from gradwire.core.requests import Gather, Sum
from gradwire.core.segments import on
from gradwire.engine import (
    Engine,
    Plan,
    Rule,
    build,
    capture,
    checkpoint,
    cuda_graphs,
    default_rules,
    encoders,
)
from gradwire.engine.capture import CaptureError, in_collectives, resume
from gradwire.engine.cuda_graphs import EAGER_STEPS, MAX_ADDRESS_CHANGES, StepExecutor
from gradwire.engine.drive import Clock, RoundGenerator
from gradwire.engine.gradients import FixedGrads
from gradwire.engine.step import StepResult
from gradwire.engine.views import GradViews
from gradwire.kernels import dispatch, fused

SHAPES = {"a.weight": (40, 30), "a.bias": (40,), "b.weight": (20, 40), "b.bias": (10,)}
SPECS = {
    "topk": ("topk(0.05) | int32", "residual(decay=0.9)", None),
    "dgc": ("topk(0.05) | int32", "momentum_correction", None),
    "topk sign": ("topk(0.05) | sign | int32", None, None),
    "sign": ("sign", None, "allgather"),
    "ef21": ("sign", "ef21", None),
    "two_way": ("int4", "residual", "two_way"),
    "common momentum": ("sign(per=64)", "common_momentum", "two_way"),
    "common momentum, gathered": ("sign", "common_momentum(divide='after')", "allgather"),
    "preconditioned": ("topk(0.05) | sign | int32", "preconditioned_momentum(masking=True)", None),
    "fp16": ("fp16", "residual", None),
    "fp32": ("fp32", "momentum_correction", None),
    "powersgd": ("powersgd(2)", None, None),
    "no feedback": ("sign", "none", "allgather"),
}
IN_PLACE = ["dgc", "topk sign", "sign", "two_way", "common momentum", "preconditioned", "fp32"]
BAD = {8: "b.weight", 11: "a.bias"}  # steps that are dropped, one with either generation of the state
STEPS = 14


@pytest.fixture(autouse=True)
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused encoders by their definitions, and nothing reads data: what is captured must not depend on it."""
    monkeypatch.setattr(dispatch, "faster", lambda device: {})
    monkeypatch.setattr(fused, "top", largest)
    monkeypatch.setattr(encoders, "zero_nonfinite", zero_nonfinite)


class Rank:
    """A world of one, whose gradients come to the same addresses unless ``moves``."""

    def __init__(
        self,
        plan: Plan,
        graphs: Callable[[], FakeCudaGraph] | None,
        rollback: bool = True,
        complete: bool = True,
        moves: bool = False,
        bad: dict[int, str] = BAD,
    ) -> None:
        self.engine = Engine(plan, 0, 1, 0, torch.device("cpu"), rollback)
        for state in self.engine.states:
            if "denominator" in state.tensors:
                state.tensors["denominator"].fill_(0.5)
        self.backend, self.clock = SingleBackend(), Clock()
        self.executor = StepExecutor(self.engine, self.backend, self.clock, graphs)
        self.complete, self.moves, self.bad = complete, moves, bad
        self.grads = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        self.held: list[Tensor] = []  # so that addresses are not used again

    def step(self, number: int) -> list[Tensor]:
        """What a step hands out and leaves behind."""
        draw = torch.Generator().manual_seed(number)
        for name, shape in SHAPES.items():
            grad = torch.randn(shape, generator=draw)
            if number in self.bad and self.bad[number] == name:
                grad.view(-1)[-1] = torch.inf
            if self.moves:
                self.held.append(self.grads[name])
                self.grads[name] = grad
            else:
                self.grads[name].copy_(grad)
        result = self.run()
        assert all(result.updates[name].data_ptr() == grad.data_ptr() for name, grad in self.grads.items())
        return [*(x.clone() for x in self.grads.values()), *self.state()]

    def run(self) -> StepResult:
        return self.executor.run(dict(self.grads), complete=self.complete)

    def state(self) -> list[Tensor]:
        slots = [lane.state_specs(1) for lane in self.engine.plan.lanes]
        states = zip(self.engine.states, slots, strict=True)
        return [state.tensors[name].clone() for state, names in states for name in names]

    @property
    def captures(self) -> list[int]:
        return [len(bucket.captures) for bucket in self.executor._buckets]


def plan_of(name: str) -> Plan:
    plan = build(SHAPES, default_rules(*SPECS[name]), 1, bucket_bytes=4 * 1000)
    assert len(plan.buckets) == 2
    return plan


def same(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return all(torch.equal(mine, known) for mine, known in zip(left, right, strict=True))


@pytest.mark.parametrize("complete", [True, False], ids=["status later", "status at once"])
@pytest.mark.parametrize("name", SPECS)
def test_replayed_steps_equal_eager_steps(name: str, complete: bool) -> None:
    plan = plan_of(name)
    eager, replayed = Rank(plan, None), Rank(plan, FakeCudaGraphs(), complete=complete)
    captures = 1 if name == "no feedback" else 2  # one for each generation of the state
    for number in range(STEPS):
        made = FakeCudaGraph.made
        assert same(replayed.step(number), eager.step(number)), number
        first, last = EAGER_STEPS, EAGER_STEPS + captures * (1 + complete)  # commits run once before they are captured
        assert (FakeCudaGraph.made > made) == (first <= number < last), number
    assert replayed.captures == [captures] * 2
    for rank in (eager, replayed):
        assert (rank.engine.step, rank.engine.skipped) == (STEPS, len(BAD))
    assert replayed.engine.accounting.encoded == eager.engine.accounting.encoded
    assert replayed.engine.accounting.dense == eager.engine.accounting.dense
    assert replayed.backend.traffic == eager.backend.traffic
    assert replayed.clock.encode > 0.0 and replayed.clock.decode > 0.0


@pytest.mark.parametrize("start", [4, 5])
def test_a_start_and_refreshes_of_the_variance_are_replayed_as_eager_steps(start: int) -> None:
    plan = build(SHAPES, default_rules(f"zero_one_adam(start={start}, refresh=2, per=64)"), 1, bucket_bytes=4 * 1000)
    bad = {start: "a.weight", 12: "b.weight"}
    eager, replayed = Rank(plan, None, bad=bad), Rank(plan, FakeCudaGraphs(), bad=bad)
    for number in range(18):  # of which 6, 10 and 14 send gradients again
        for rank in (eager, replayed):
            for state in rank.engine.states if number == start else ():
                state.spare = None  # as where the variance is frozen
        assert same(replayed.step(number), eager.step(number)), number


@pytest.mark.parametrize("start", [1, 3, 4, 5, 9])
def test_what_follows_a_start_runs_eagerly_before_it_is_captured(start: int) -> None:
    """Kernels and tables are made by eager steps: a capture of what never ran would be refused."""
    plan = build(SHAPES, default_rules(f"onebit_adam(start={start}, per=64)"), 1, bucket_bytes=4 * 1000)
    eager, replayed = Rank(plan, None, bad={}), Rank(plan, FakeCudaGraphs(), bad={})
    for number in range(start + 8):
        for rank in (eager, replayed):
            for state in rank.engine.states if number == start else ():
                state.spare = None
        made = FakeCudaGraph.made
        assert same(replayed.step(number), eager.step(number)), number
        of_phase = number - (start if number >= start else 0)
        assert of_phase >= EAGER_STEPS or FakeCudaGraph.made == made, number
    assert replayed.captures == [2, 2] and replayed.executor.replayed


@pytest.mark.parametrize("complete", [True, False], ids=["status later", "status at once"])
@pytest.mark.parametrize("name", SPECS)
def test_gradients_at_moving_addresses_are_staged(name: str, complete: bool) -> None:
    plan = plan_of(name)
    eager, replayed = Rank(plan, None), Rank(plan, FakeCudaGraphs(), complete=complete, moves=True)
    for number in range(STEPS):
        assert same(replayed.step(number), eager.step(number)), number
        staged = [bucket.staging is not None for bucket in replayed.executor._buckets]
        assert staged == [number > MAX_ADDRESS_CHANGES] * 2, number
    assert max(replayed.captures) == (1 if name == "no feedback" else 2)
    assert replayed.engine.skipped == len(BAD)


@pytest.mark.parametrize("given_up", [False, True], ids=["used", "given up"])
@pytest.mark.parametrize("name", ["dgc", "two_way", "powersgd", "fp16"])
def test_gradients_become_views_of_buffers(name: str, given_up: bool) -> None:
    """A step for which they did may be given up before it is run; the next one has other gradients."""
    plan = plan_of(name)
    eager, replayed = Rank(plan, None), Rank(plan, FakeCudaGraphs(), moves=True)
    taken: list[bool] = []

    def take_in_and_run() -> StepResult:
        grads = dict(replayed.grads)
        for i, bucket in enumerate(plan.buckets):
            views = replayed.executor.take_in(i, grads)
            taken.append(views is not None)
            names = [name for lane in bucket for name in lane.tensors.names]
            grads |= dict(zip(names, views, strict=True)) if views else {}
        if given_up:
            return replayed.executor.run(dict(replayed.grads), complete=True)
        results = [replayed.executor.run_bucket(i, grads) for i in range(len(plan.buckets))]
        replayed.grads = grads
        return replayed.executor.finish(results, grads, complete=True)

    replayed.run = take_in_and_run
    replayed.held = deque(maxlen=0)  # nobody keeps gradients of earlier steps
    for number in range(STEPS):
        assert same(replayed.step(number), eager.step(number)), number
    assert any(taken) and replayed.engine.skipped == len(BAD)


@pytest.mark.parametrize("moves", [False, True], ids=["once", "after a move"])
def test_gradients_that_stay_are_looked_at_once(moves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """DDP keeps its buckets, and says so by one table for all steps."""
    look, looks = StepExecutor._inspect_layout, list[int]()
    monkeypatch.setattr(StepExecutor, "_inspect_layout", lambda self, i, grads: looks.append(i) or look(self, i, grads))
    plan = plan_of("dgc")
    eager, replayed = Rank(plan, None), Rank(plan, FakeCudaGraphs())
    fixed = FixedGrads(replayed.grads)
    monkeypatch.setattr(replayed, "run", lambda: replayed.executor.run(fixed, complete=True))
    for number in range(STEPS + 6):
        if moves and number == 7:
            replayed.grads = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
            fixed = FixedGrads(replayed.grads)
        assert same(replayed.step(number), eager.step(number)), number
    assert looks == [0, 1] * (1 + moves)
    assert replayed.captures == [2, 2] and replayed.executor.replayed


@pytest.mark.parametrize("name", ["dgc", "sign", "fp16"])
def test_gradients_that_are_not_contiguous_are_captured_where_they_lie(name: str) -> None:
    plan = plan_of(name)
    eager, replayed = Rank(plan, None), Rank(plan, FakeCudaGraphs())
    for rank in (eager, replayed):
        rank.grads["a.weight"] = torch.zeros(30, 40).T
    for number in range(STEPS):
        assert same(replayed.step(number), eager.step(number)), number
    assert all(bucket.staging is None for bucket in replayed.executor._buckets)
    assert min(replayed.captures) > 0 and replayed.engine.skipped == len(BAD)


def in_one_bucket(rank: Rank) -> None:
    """Lay the gradients of a rank as DDP does: in the order of backward, with 1-D tensors between weights, for good."""
    flat, at = torch.zeros(sum(grad.numel() for grad in rank.grads.values())), 0
    for name in reversed(list(SHAPES)):
        grad = rank.grads[name]
        rank.grads[name] = flat[at : at + grad.numel()].view(grad.shape)
        at += grad.numel()
    fixed = FixedGrads(rank.grads)
    rank.run = lambda: rank.executor.run(fixed, complete=rank.complete)


PIECES = {name: SPECS[name] for name in ("common momentum", "preconditioned")}
PIECES["as they are"] = ("topk(0.05) | int32", "preconditioned_momentum(masking=True)", None)


@pytest.mark.parametrize("rollback", [True, False])
@pytest.mark.parametrize("name", PIECES)
def test_gradients_between_others_are_read_and_written_where_they_lie(
    name: str, rollback: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = build(SHAPES, default_rules(*PIECES[name]), 1)
    assert [lane.tensors.names for lane in plan.lanes] == [("b.bias", "a.bias"), ("b.weight", "a.weight")]
    bad = BAD if rollback else {}
    eager = Rank(plan, None, rollback, bad=bad)
    known = [eager.step(number) for number in range(STEPS)]
    monkeypatch.setattr(GradViews, "_takes_scattered", True)  # as on a GPU; these are definitions
    write, written = GradViews.write_, list[int]()
    monkeypatch.setattr(
        GradViews,
        "write_",
        lambda view, x: written.append(len(x.parts) if isinstance(x, Scattered) else 1) or write(view, x),
    )
    replayed = Rank(plan, FakeCudaGraphs(), rollback, bad=bad)
    in_one_bucket(replayed)
    assert all(same(replayed.step(number), known[number]) for number in range(STEPS))
    assert min(replayed.captures) > 0 and written[-2:] == [1, 2]  # the bundle's, and both weights


@pytest.mark.parametrize("last", [2, 3])
def test_a_capture_that_fails_finds_gradients_between_others_as_they_were(
    last: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = build(SHAPES, default_rules(*PIECES["common momentum"]), 1)
    eager = Rank(plan, None)
    known = [eager.step(number) for number in range(STEPS)]
    monkeypatch.setattr(GradViews, "_takes_scattered", True)  # as on a GPU; these are definitions
    fail_captures(monkeypatch, lambda segment: segment % last == 0)
    replayed = Rank(plan, FakeCudaGraphs())
    in_one_bucket(replayed)
    assert all(same(replayed.step(number), known[number]) for number in range(STEPS))
    assert replayed.captures == [0]


def addresses(rank: Rank) -> list[int]:
    return [x.data_ptr() for state in rank.engine.states for x in state.tensors.values()]


@pytest.mark.parametrize("name", IN_PLACE)
def test_state_that_is_changed_in_place_stays_there(name: str) -> None:
    rules = (Rule("fp16", name="b.weight", feedback="residual"), *default_rules(*SPECS[name]))
    plan = build(SHAPES, rules, 1, bucket_bytes=4)
    assert {lane.fused for lane in plan.lanes} == {True, False}  # what no kernel changes is copied to where it was
    eager, replayed = Rank(plan, None, bad={}), Rank(plan, FakeCudaGraphs(), rollback=False, bad={})
    for number in range(9):
        made, at = FakeCudaGraph.made, addresses(replayed)
        assert same(replayed.step(number), eager.step(number)), number
        assert (FakeCudaGraph.made > made) == (EAGER_STEPS <= number <= EAGER_STEPS + 1), number  # the step, its commit
        assert number <= EAGER_STEPS or addresses(replayed) == at, number
    assert set(replayed.captures) == {1}
    assert replayed.engine.accounting.encoded == eager.engine.accounting.encoded


def fail_captures(monkeypatch: pytest.MonkeyPatch, fails: Callable[[int], bool]) -> None:
    """From now on those segments of captures fail, counted from 1."""
    known, segments = capture.advance, [0]

    def advance(*args: object) -> object:
        segments[0] += 1
        if fails(segments[0]):
            raise RuntimeError("operation not permitted when stream is capturing")
        return known(*args)

    monkeypatch.setattr(capture, "advance", advance)


def test_a_failed_capture_in_place_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_captures(monkeypatch, lambda segment: segment in (2, 4))  # the first ones have changed the state
    plan = plan_of("dgc")
    eager, replayed = Rank(plan, None, bad={}), Rank(plan, FakeCudaGraphs(), rollback=False, bad={})
    for number in range(9):
        assert same(replayed.step(number), eager.step(number)), number
    assert replayed.captures == [1, 1]  # the second try succeeded
    assert replayed.backend.traffic == eager.backend.traffic


def test_a_failed_capture_runs_eagerly_and_sends_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_captures(monkeypatch, lambda segment: segment % 2 == 0)  # after a message has been sent
    plan = plan_of("dgc")
    eager, replayed = Rank(plan, None), Rank(plan, FakeCudaGraphs())
    for number in range(STEPS + 10):
        assert same(replayed.step(number), eager.step(number)), number
    assert replayed.backend.traffic == eager.backend.traffic
    assert replayed.engine.accounting.encoded == eager.engine.accounting.encoded and replayed.captures == [0, 0]


@pytest.mark.parametrize("spec", ["topk(0.05) | int32", "int8"])
@pytest.mark.parametrize("last", [3, 4])
def test_a_capture_that_fails_at_its_end_finds_gradients_as_they_were(
    last: int, spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lane that has received everything may write its update while another one still communicates."""
    alone = Rule(spec, name="a.weight", feedback="residual", exchange="allgather")  # end to end: written where it lies
    rules = (Rule("int4", name="b.*", exchange="two_way"), alone, *default_rules("topk(0.05) | int32", bundle=None))
    plan = build(SHAPES, rules, 1)
    fail_captures(monkeypatch, lambda segment: segment % last == 0)
    eager, replayed = Rank(plan, None), Rank(plan, FakeCudaGraphs())
    for number in range(STEPS):
        assert same(replayed.step(number), eager.step(number)), number
    assert replayed.captures == [0]


def test_without_room_for_a_copy_nothing_is_captured_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, clone = Rank(plan_of("dgc"), FakeCudaGraphs(), rollback=False, bad={}), Tensor.clone
    capturing = cuda_graphs.StepExecutor._capture

    def full(x: Tensor) -> Tensor:
        if any(x is y for state in rank.engine.states for y in state.tensors.values()):
            raise torch.OutOfMemoryError
        return clone(x)

    def capture_in_little_room(*args: object) -> object:
        with monkeypatch.context() as patch:
            patch.setattr(Tensor, "clone", full)
            return capturing(*args)

    monkeypatch.setattr(cuda_graphs.StepExecutor, "_capture", capture_in_little_room)
    for number in range(EAGER_STEPS + 2):
        rank.step(number)
    assert rank.captures == [0, 0]


def test_a_state_changed_in_place_can_be_replaced_by_a_checkpoint() -> None:
    plan = plan_of("dgc")
    replayed, eager = (Rank(plan, graphs, rollback=False, bad={6: "b.weight"}) for graphs in (FakeCudaGraphs(), None))
    for number in range(12):
        if number == 5:
            saved = [checkpoint.save(rank.engine, "") for rank in (replayed, eager)]
        if number == 6:
            with pytest.raises(RuntimeError, match="rollback=False"):
                eager.step(number)
            replayed.step(number)
            for rank in (replayed, eager):
                with pytest.raises(RuntimeError, match="rollback=False"):
                    checkpoint.save(rank.engine, "")
            for rank, state in zip((replayed, eager), saved, strict=True):
                checkpoint.load(rank.engine, [state])
            continue
        assert same(replayed.step(number), eager.step(number)), number


def test_another_state_is_captured_anew() -> None:
    plan = plan_of("dgc")
    eager, replayed = Rank(plan, None), Rank(plan, FakeCudaGraphs())
    for number in range(STEPS + 4):
        if number == 7:  # as if a checkpoint had been loaded
            for rank in (eager, replayed):
                for state in rank.engine.states:
                    state.replace({name: x * 0.5 for name, x in state.tensors.items()})
        assert same(replayed.step(number), eager.step(number)), number
    assert replayed.captures == [2, 2]


def test_another_codec_is_captured_anew() -> None:
    rules = default_rules({0: "topk(0.1) | int32", 6: "topk(0.05) | int32"}, "residual")
    plan = build(SHAPES, rules, 1)
    eager, replayed = Rank(plan, None), Rank(plan, FakeCudaGraphs())
    for number in range(STEPS):
        assert same(replayed.step(number), eager.step(number)), number
    assert replayed.captures == [2]


@pytest.mark.parametrize("spec", ["qsgd", "topk(0.1) | qsgd | int32", "terngrad"])
def test_random_codecs_are_captured_and_draw_anew_at_every_step(spec: str) -> None:
    plan = build(SHAPES, default_rules(spec), 1, bucket_bytes=4 * 1000)
    eager, replayed = Rank(plan, None, bad={}), Rank(plan, FakeCudaGraphs(), bad={})
    for number in range(STEPS):
        assert same(replayed.step(number), eager.step(number)), number
    assert min(replayed.captures) > 0


def test_a_host_that_draws_inside_a_capture_is_refused() -> None:
    with pytest.raises(RandomnessInGraph):
        Key(0, 0, 0, device_counter=torch.zeros(2, dtype=torch.int64)).fold("x").counter()


@pytest.mark.parametrize(
    ("spec", "dense", "known"),
    [
        ("topk(0.05) | int32", "b.weight", [1, 2]),  # whose one capture is replayed between the two of the other bucket
        ("sign", "b.weight", [1, 2]),
        ("sign", "a.bias", [2, 1, 2]),  # and while the first bucket waits for the commit
        ("sign", "b.bias", [1, 2, 2]),
    ],
)
def test_a_bucket_with_one_capture_overwrites_nothing(spec: str, dense: str, known: list[int]) -> None:
    plan = build(SHAPES, (Rule("fp16", name=dense), *default_rules(spec, "residual")), 1, bucket_bytes=4)
    eager, replayed = Rank(plan, None), Rank(plan, FakeCudaGraphs())
    for number in range(STEPS):
        assert same(replayed.step(number), eager.step(number)), number
    assert replayed.captures == known and replayed.engine.skipped == len(BAD)


@pytest.mark.parametrize("name", ["b.weight", "a.weight"])
def test_a_bucket_that_is_captured_anew_alone_is_overwritten_by_no_other(name: str) -> None:
    rules = (Rule({0: "int8", 7: "int4"}, name=name, feedback="residual"), *default_rules("sign", "residual"))
    plan = build(SHAPES, rules, 1, bucket_bytes=4)
    eager, replayed = Rank(plan, None), Rank(plan, FakeCudaGraphs())
    for number in range(STEPS + 4):
        assert same(replayed.step(number), eager.step(number)), number
    assert replayed.captures == [2, 2] and replayed.engine.skipped == len(BAD)


def test_a_generator_is_resumed_where_it_could_not_be_captured() -> None:
    def rounds() -> RoundGenerator[Tensor]:
        (first,) = yield [Sum(torch.ones(2))]
        (second,) = yield [Gather(Payload(torch.ones(1, dtype=torch.uint8)), 1)]
        total: Tensor = first + second[0].data
        return total

    backend = SingleBackend()
    assert resume(in_collectives(rounds(), backend), backend).tolist() == [2.0, 2.0]
    assert backend.traffic.collectives == 2
    assert resume(in_collectives(rounds(), backend), backend, [torch.full((2,), 5.0)]).tolist() == [6.0, 6.0]
    assert backend.traffic.collectives == 3
    captured = capture.capture(in_collectives(rounds(), backend), backend, FakeCudaGraph)
    assert captured.replay(backend, Clock()).tolist() == [2.0, 2.0] and backend.traffic.collectives == 7

    def wrong() -> RoundGenerator[Tensor]:
        yield [Sum(torch.ones(2))]
        raise RuntimeError("no")

    with pytest.raises(CaptureError) as refused:
        capture.capture(in_collectives(wrong(), backend), backend, FakeCudaGraph)
    assert [x.tolist() for x in refused.value.results] == [[1.0, 1.0]] and not refused.value.permanent


def test_tables_live_as_long_as_the_capture() -> None:
    cpu = torch.device("cpu")
    known = on((1, 2, 3), cpu)
    with pin_tables() as refs:
        assert on((1, 2, 3), cpu) is known
        pin("a plan")
    on((4,), cpu)
    assert len(refs) == 2 and refs[0] is known and refs[1] == "a plan"


@pytest.mark.parametrize("spec", ["sign", "int4"])
@pytest.mark.parametrize("rollback", [True, False])
@pytest.mark.parametrize("exchange", ["allgather", "two_way"])
def test_the_mean_that_is_kept_is_not_where_the_update_goes(exchange: str, rollback: bool, spec: str) -> None:
    """Gradients lie end to end, so that means, or what is made of them, may be decoded to where they lie."""
    plan = build(SHAPES, default_rules(spec, "common_momentum", exchange, bundle=None), 1)
    rank = Rank(plan, None, rollback)
    momentum = rank.engine.states[0].tensors["momentum"]
    ((lane,),) = rank.engine.plan.buckets
    flat = torch.zeros(lane.units.total)
    rank.grads = {name: flat[place].view(SHAPES[name]) for name, place in lane.slices.items()}
    for number in range(3):
        rank.step(number)
        assert flat.any() and torch.equal(0.5 * rank.engine.states[0].tensors["momentum"], flat)
    assert rollback or rank.engine.states[0].tensors["momentum"] is momentum
