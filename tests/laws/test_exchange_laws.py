"""Laws of every exchange, in lockstep: ranks agree to the last bit, and no part of a gradient is lost."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import cycle

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import gradwire
from gradwire.codecs.codec import Codec, codec
from gradwire.core import registry
from gradwire.core.spec import parse
from gradwire.engine import Engine, Lockstep, Method, Rule, build, method
from gradwire.engine.step import StepResult
from gradwire.exchanges import Exchange, Noop
from gradwire.exchanges.powersgd import _multiply_, _runs
from gradwire.exchanges.servers import server_slice
from gradwire.feedback import MomentumCorrection
from strategies import CODECS, EXCHANGES, FEEDBACKS, tensor

WORLDS = (1, 2, 3, 4, 5)
PAIRS = ((2, 5), (1, 3), (4, 5), (2, 3), (1, 4))  # where every world for every method would take too long
CPU = torch.device("cpu")
# A matrix worth factoring, one that is not, a kernel, and too few elements for five servers.
SHAPES = {"a.weight": (6, 9), "a.bias": (3,), "b.weight": (4, 3, 2), "c": (1,), "d.weight": (2, 2)}
FEW = ("fp32", "sign", "topk(0.3) | sign | int32")
MANY = (*FEW, "bf16", "qsgd", "topk(0.3)", "randomk(0.3)", "threshold(0.5)")

Grads = Mapping[str, Tensor | None]
Meaning = Callable[[Sequence[Grads]], dict[str, Tensor]]


class Group:
    """Ranks of one process, and their state."""

    def __init__(self, whole: Method, world: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES, **options: object):
        plan = build(shapes, [Rule(whole, **options)], world, bucket_bytes=300)
        self.lockstep = Lockstep(world)
        self.sessions = [Engine(plan, rank, world, 11, CPU) for rank in range(world)]

    def step(self, grads: Sequence[Grads]) -> list[StepResult]:
        talks = [session.run(grad) for session, grad in zip(self.sessions, grads, strict=True)]
        return self.lockstep.drive(talks)

    def debts(self) -> Tensor:
        """The mean over ranks of pending errors, over all lanes."""
        errors = [torch.cat([self._debt(session, i) for i in range(len(session.states))]) for session in self.sessions]
        return torch.stack(errors).double().mean(0)

    def flat(self, named: Mapping[str, Tensor]) -> Tensor:
        """Tensors by name, in the order of the lanes."""
        names = [name for lane in self.sessions[0].plan.lanes for name in lane.tensors.names]
        return torch.cat([named[name].flatten() for name in names]).double()

    def _debt(self, session: Engine, i: int) -> Tensor:
        return session.plan.lanes[i].pending_error(session.states[i], session.rank, session.world)


def gradients(
    world: int, step: int, kind: str = "normal", shapes: Mapping[str, tuple[int, ...]] = SHAPES
) -> list[Grads]:
    """One set for each rank."""
    return [
        {
            name: tensor(kind, torch.Size(shape).numel(), seed=1000 * rank + 10 * step + i).reshape(shape)
            for i, (name, shape) in enumerate(shapes.items())
        }
        for rank in range(world)
    ]


def mean_of(grads: Sequence[Grads]) -> dict[str, Tensor]:
    return {name: torch.stack([grad[name] for grad in grads]).double().mean(0) for name in grads[0]}


def legal(exchanges: Sequence[str], feedbacks: Sequence[str], codecs: Sequence[str]) -> Iterator[Method]:
    """All combinations that a method does not refuse."""
    for exchange in exchanges:
        for feedback in feedbacks:
            for spec in ("fp32",) if parse(exchange).compresses_in_protocol else codecs:
                with suppress(ValueError):
                    yield method(spec, feedback, exchange)


def each_method(exchanges: Sequence[str], feedbacks: Sequence[str], codecs: Sequence[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("whole", list(legal(exchanges, feedbacks, codecs)), ids=str)


def communicates(exchange: Exchange) -> bool:
    return not isinstance(exchange, Noop)


def combinations(exchange: str) -> list[Method]:
    others = [spec for spec in FEEDBACKS if spec != "residual"]
    return [*legal([exchange], others, FEW), *legal([exchange], ["residual"], MANY)]


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_every_feedback_goes_with_every_exchange(exchange: str) -> None:
    assert {whole.feedback for whole in combinations(exchange)} == set(map(parse, FEEDBACKS))


@pytest.mark.parametrize(
    ("whole", "world"),
    [pair for exchange in EXCHANGES for pair in zip(combinations(exchange), cycle(WORLDS), strict=False)],
    ids=str,
)
def test_all_ranks_agree_to_the_last_bit(whole: Method, world: int) -> None:
    group = Group(whole, world)
    for step in range(2):
        first, *rest = group.step(gradients(world, step))
        assert not first.skipped and {name: x.shape for name, x in first.updates.items()} == SHAPES
        assert all(x.dtype == torch.float32 and x.isfinite().all() for x in first.updates.values())
        for other in rest if communicates(whole.exchange) else []:
            assert all(_same_bits(x, other.updates[name]) for name, x in first.updates.items())
    _assert_common_memories_agree(group)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def _assert_common_memories_agree(group: Group) -> None:
    first, *others = group.sessions
    for i, lane in enumerate(first.plan.lanes):
        for name, slot in lane.state_specs(first.world).items():
            if slot.reshard == "same" and communicates(lane.step_table[0][2]):
                assert all(
                    torch.equal(first.states[i].tensors[name], other.states[i].tensors[name]) for other in others
                ), name


@settings(max_examples=50)
@given(
    spec=st.sampled_from(list(CODECS)),
    exchange=st.sampled_from([spec for spec in EXCHANGES if not parse(spec).compresses_in_protocol]),
    feedback=st.sampled_from(FEEDBACKS),
    kind=st.sampled_from(["normal", "zeros", "spike", "denormal", "huge", "bf16", "strided"]),
    world=st.sampled_from(WORLDS),
)
def test_any_legal_method_takes_any_gradient(spec: str, exchange: str, feedback: str, kind: str, world: int) -> None:
    whole = next(legal([exchange], [feedback], [spec]), None)
    assume(whole is not None)
    group = Group(whole, world)
    for step in range(2):
        grads = gradients(world, step, kind)
        states = torch.get_rng_state(), random.getstate()
        verdicts = group.step(grads)
        assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
        for own, verdict in zip(grads, verdicts, strict=True):  # an update lies where its gradient lay
            assert all(x is not None and verdict.updates[name].data_ptr() == x.data_ptr() for name, x in own.items())
        assert all(x.isfinite().all() for verdict in verdicts for x in verdict.updates.values())
        if communicates(whole.exchange):
            assert all(_same_bits(x, v.updates[name]) for v in verdicts for name, x in verdicts[0].updates.items())


@pytest.mark.parametrize("spec", ["fp16", "bf16", "hadamard | fp16", "randomk(0.3, unbiased=True) | fp16", "fp32"])
def test_sums_stay_finite(spec: str) -> None:
    for world in WORLDS:
        for kind in ("huge", "constant"):
            group = Group(method(spec, "residual", "allreduce"), world)
            for step in range(2):
                grads = [{name: x * 1e7 for name, x in g.items()} for g in gradients(world, step, kind)]
                updates = group.step(grads)[0].updates
                assert all(x.isfinite().all() for x in updates.values()), f"{spec} at {world} ranks, {kind}"
                assert group.debts().isfinite().all()


EXACT = [spec for spec in EXCHANGES if parse(spec).exact]


def test_which_exchanges_are_exact() -> None:
    assert {"allreduce", "allgather", "two_way"} <= set(EXACT)


@pytest.mark.parametrize("granularity", ["layer", "bucket", "model"])
@pytest.mark.parametrize("exchange", [*EXACT, "auto"])
@pytest.mark.parametrize("world", WORLDS)
def test_exact_exchanges_give_the_mean_of_fp32(world: int, exchange: str, granularity: str) -> None:
    grads = gradients(world, 0)
    group = Group(method("fp32", "none", exchange), world, granularity=granularity)
    updates = group.step(grads)[0].updates
    for name, mean in mean_of(grads).items():
        assert torch.allclose(updates[name].double(), mean, rtol=1e-6, atol=1e-6), name


@each_method(EXCHANGES, ["none", "residual"], FEW)
def test_one_element_is_enough_for_any_world(whole: Method) -> None:
    shapes = {"x": (1,)}
    for world in WORLDS:
        group = Group(whole, world, shapes)
        verdicts = group.step(gradients(world, 0, shapes=shapes))
        assert all(verdict.updates["x"].shape == (1,) for verdict in verdicts), world


def conserves(made: Exchange) -> bool:
    """Whether what is not applied of the mean gradient stays in memories. Of the mean over senders it does not."""
    return (made.exact or made.compresses_in_protocol or made.delays) and getattr(made, "mean", "all") == "all"


CONSERVING = [spec for spec in EXCHANGES if conserves(parse(spec))]
CONTRACTIONS = ("fp32", "sign", "qsgd(biased=True)", "topk(0.3)", "topk(0.3) | sign | int32", "randomk(0.3)", "int4")


@pytest.mark.parametrize("spec", CONTRACTIONS)
def test_contractions_are_declared(spec: str) -> None:
    assert codec(spec).traits.contraction


@pytest.mark.parametrize(
    ("whole", "worlds"),
    [
        pair
        for exchange in CONSERVING
        for pair in zip(legal([exchange], ["residual"], CONTRACTIONS), cycle(PAIRS), strict=False)
    ],
    ids=str,
)
def test_nothing_is_lost_between_gradients_and_updates(whole: Method, worlds: tuple[int, int]) -> None:
    """Sum of updates + mean pending error = sum of mean gradients: the law that makes error feedback work."""
    for world in worlds:
        _assert_conserved(Group(whole, world), world, mean_of)


def _assert_conserved(group: Group, world: int, meant_of: Meaning, steps: int = 3) -> None:
    meant, given = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    for step in range(steps):
        grads = gradients(world, step)
        meant = meant + group.flat(meant_of(grads))
        given = given + group.flat(group.step(grads)[0].updates)
    assert torch.allclose(given + group.debts(), meant, atol=2e-5), f"{world} ranks"


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("spec", "eps"), [("fp16", 2.0**-10), ("bf16", 2.0**-7)])
def test_casts_conserve_up_to_their_own_rounding(spec: str, eps: float, world: int) -> None:
    """A sum of 16-bit numbers rounds on the way, where no rank sees it: the error is that of the cast alone."""
    group = Group(method(spec, "residual", "allreduce"), world)
    grads = gradients(world, 0)
    updates = group.flat(group.step(grads)[0].updates)
    error = (updates + group.debts() - group.flat(mean_of(grads))).abs()
    assert (error <= world * eps * 4).all()


# Masking would remove some velocity on purpose, so it is off.
VELOCITIES = [str(MomentumCorrection(0.8, nesterov=nesterov, masking=False)) for nesterov in (False, True)]


@pytest.mark.parametrize("world", [2, 3])
@each_method(CONSERVING, VELOCITIES, ["fp32", "topk(0.3) | int32", "topk(0.3) | sign", "randomk(0.3)"])
def test_momentum_correction_conserves_velocity(whole: Method, world: int) -> None:
    """Sum of updates + mean pending error = sum of mean velocities."""
    velocity: dict[str, Tensor] = {}
    nesterov = whole.feedback.nesterov

    def velocities(grads: Sequence[Grads]) -> dict[str, Tensor]:
        sent = {}
        for name, g in mean_of(grads).items():
            u = velocity.get(name, torch.zeros_like(g))
            velocity[name] = 0.8 * (u + g) if nesterov else 0.8 * u + g
            sent[name] = velocity[name] + g if nesterov else velocity[name]
        return sent

    _assert_conserved(Group(whole, world), world, velocities)


@pytest.mark.parametrize("world", [1, 2, 5])
@each_method([spec for spec in CONSERVING if not parse(spec).delays], ["ef21"], ["sign", "topk(0.3) | int32"])
def test_ef21_keeps_the_mean_of_all_estimates(whole: Method, world: int) -> None:
    """EF21 has no pending error, but the common estimate and the errors of servers make the mean of estimates."""
    group = Group(whole, world)
    for step in range(3):
        group.step(gradients(world, step))
    for i in range(len(group.sessions[0].states)):
        estimates = torch.stack([session.states[i].tensors["estimate"] for session in group.sessions]).mean(0)
        served = torch.stack([group._debt(session, i) for session in group.sessions]).mean(0)
        common = group.sessions[0].states[i].tensors["estimate_mean"]
        assert torch.allclose(common + served, estimates, atol=1e-5)


COMMUNICATING = [spec for spec in EXCHANGES if communicates(parse(spec))]


@each_method(COMMUNICATING, ["residual", "ef21"], ["fp32", "sign", "topk(0.3)"])
def test_a_bad_gradient_on_one_rank_changes_nothing_on_any(whole: Method) -> None:
    group = Group(whole, 3)
    group.step(gradients(3, 0))
    before = [[dict(state.tensors) for state in session.states] for session in group.sessions]
    grads = gradients(3, 1)
    grads[1]["b.weight"][0] = float("nan")
    verdicts = group.step(grads)
    assert all(verdict.skipped and not any(x.any() for x in verdict.updates.values()) for verdict in verdicts)
    for session, memories in zip(group.sessions, before, strict=True):
        for now, then in zip([state.tensors for state in session.states], memories, strict=True):
            assert now.keys() == then.keys() and all(torch.equal(now[name], then[name]) for name in now)


@each_method(EXCHANGES, ["residual"], ["fp32", "sign", "topk(0.3)"])
def test_a_parameter_is_left_out_only_if_no_rank_has_a_gradient(whole: Method) -> None:
    group = Group(whole, 2)
    grads = [dict(grad) for grad in gradients(2, 0)]
    grads[0]["a.bias"] = grads[1]["a.bias"] = None
    grads[1]["c"] = None
    verdicts = group.step(grads)
    assert "a.bias" not in verdicts[0].updates
    if communicates(whole.exchange):
        assert all(verdict.updates.keys() == SHAPES.keys() - {"a.bias"} for verdict in verdicts)


@each_method(EXCHANGES, ["residual"], ["qsgd", "sign", "randomk(0.3)", "topk(0.3) | terngrad | int32"])
def test_the_same_run_gives_the_same_bits(whole: Method) -> None:
    runs = []
    for _ in range(2):
        group = Group(whole, 3)
        runs.append([group.flat(group.step(gradients(3, step))[1].updates) for step in range(2)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_exchanges_have_one_spelling(exchange: str) -> None:
    assert parse(str(parse(exchange))) == parse(exchange)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    "exchange", [spec for spec in COMMUNICATING if not parse(spec).sends_slices]
)  # a cut adds scales
def test_traffic_is_as_predicted_plus_one_status(exchange: str, world: int) -> None:
    group = Group(next(legal([exchange], ["none", "residual"], ["fp32", "sign"])), world)
    group.step(gradients(world, 0))
    plan = group.sessions[0].plan
    predicted = sum(
        made.traffic(chain, lane.tensors, world) for lane in plan.lanes for _, chain, made in lane.step_table
    )
    measured = group.lockstep.traffic[0].sent
    *_, (_, _, made) = plan.lanes[0].step_table
    sums = getattr(made, "inner", made).adds_payloads or made.compresses_in_protocol
    assert measured == pytest.approx(predicted + len(plan.buckets) * (world - 1) * (8 / world if sums else 1))


def test_gradients_keep_their_dtype_shape_and_layout() -> None:
    torch_state = torch.get_rng_state()
    models = [nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2)).bfloat16() for _ in range(2)]
    group = gradwire.lockstep(models, "topk(0.3) | sign")
    before = torch.get_rng_state()
    for rank, model in enumerate(models):
        for i, p in enumerate(model.parameters()):
            p.grad = tensor("normal", p.numel(), seed=9 * rank + i).view(p.shape).bfloat16()
        weight = models[rank][0].weight
        weight.grad = weight.grad.contiguous(memory_format=torch.channels_last)
    group()
    assert torch.equal(torch.get_rng_state(), before)
    torch.set_rng_state(torch_state)
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert a.grad is not None and a.grad.dtype == torch.bfloat16 and a.grad.shape == a.shape
        assert torch.equal(a.grad, b.grad)


@given(n=st.integers(0, 3000), world=st.integers(1, 9))
def test_shards_begin_at_a_whole_byte(n: int, world: int) -> None:
    cuts = [server_slice(n, world, rank) for rank in range(world)]
    assert [0, *(stop for _, stop in cuts)] == [*(start for start, _ in cuts), n]
    assert all(start % 8 == 0 for start, stop in cuts if start < stop)
    assert max(stop - start for start, stop in cuts) < n / world + 8


def test_products_of_equal_layers_are_written_together() -> None:
    """Layers at equal distances make one batched product each run; others are multiplied one by one."""
    starts = (5, 25, 45, 80, 95)
    assert _runs(starts) == ((0, 3), (3, 5)) and _runs((7,)) == ((0, 1),) and _runs(()) == ()
    left, right = torch.randn(5, 3, 2), torch.randn(5, 5, 2)
    flat = torch.full((120,), 7.0)
    _multiply_(flat[2:], left, right, starts)
    expected = torch.full((118,), 7.0)
    for p, q, start in zip(left, right, starts, strict=True):
        expected[start : start + 15] = (p @ q.mT).flatten()
    torch.testing.assert_close(flat[2:], expected)


class Cheap(Noop):
    """Sends nothing, and suits one codec."""

    name = "cheap"

    def auto_may_choose(self, codec: Codec) -> bool:
        return str(codec) == "int4"


@pytest.mark.parametrize(
    ("spec", "world", "chosen"),
    [
        *(("fp16", world, "allreduce") for world in (1, 2, 4)),  # whose payloads are added on the way
        *(("topk(0.1) | sign | int32", world, "allgather") for world in (1, 2, 4)),  # which has no second leg
        *(("sign", world, "allgather") for world in (1, 2)),  # as short as two legs
        ("sign", 4, "two_way"),
        ("int4", 4, "cheap"),
    ],
)
def test_auto_takes_what_sends_least_of_all_exchanges_that_suit(
    spec: str, world: int, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry._ENTRIES, "cheap", ("exchange", Cheap))
    monkeypatch.setitem(registry._ENTRIES, "needy", ("exchange", lambda argument: None))  # never made
    plan = build(SHAPES, [Rule(spec)], world)
    assert {exchange.name for lane in plan.lanes for _, _, exchange in lane.step_table} == {chosen}
