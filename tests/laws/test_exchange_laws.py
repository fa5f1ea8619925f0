"""Laws of every exchange, held in lockstep: ranks agree to the last bit, and nothing goes astray between them."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import gradwire
from gradwire.codecs.codec import codec
from gradwire.core.spec import parse
from gradwire.engine import Lockstep, Method, Rule, Session, build, method
from gradwire.engine.session import Verdict
from gradwire.exchanges import Exchange, Noop
from gradwire.exchanges.powersgd import _multiply_, _runs
from gradwire.exchanges.two_way import shard
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
    """Ranks of one process, and what they have been through."""

    def __init__(self, whole: Method, world: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES, **options: object):
        plan = build(shapes, [Rule(whole, **options)], world, launch_bytes=300)  # type: ignore[arg-type]
        self.lockstep = Lockstep(world)
        self.sessions = [Session(plan, rank, world, 11, CPU) for rank in range(world)]

    def step(self, grads: Sequence[Grads]) -> list[Verdict]:
        talks = [session.run(grad) for session, grad in zip(self.sessions, grads, strict=True)]
        return self.lockstep.drive(talks)

    def debts(self) -> Tensor:
        """The mean over ranks of what is still to come, over all lanes."""
        owed = [torch.cat([self._debt(session, i) for i in range(len(session.memories))]) for session in self.sessions]
        return torch.stack(owed).double().mean(0)

    def flat(self, named: Mapping[str, Tensor]) -> Tensor:
        """Tensors by name, in the order of the lanes."""
        names = [name for lane in self.sessions[0].plan.lanes for name in lane.tensors.names]
        return torch.cat([named[name].flatten() for name in names]).double()

    def _debt(self, session: Session, i: int) -> Tensor:
        return session.plan.lanes[i].debt(session.memories[i], session.rank, session.world)


def gradients(
    world: int, step: int, kind: str = "normal", shapes: Mapping[str, tuple[int, ...]] = SHAPES
) -> list[Grads]:
    """Every rank its own."""
    return [
        {
            name: tensor(kind, torch.Size(shape).numel(), seed=1000 * rank + 10 * step + i).reshape(shape)
            for i, (name, shape) in enumerate(shapes.items())
        }
        for rank in range(world)
    ]


def mean_of(grads: Sequence[Grads]) -> dict[str, Tensor]:
    return {name: torch.stack([grad[name] for grad in grads]).double().mean(0) for name in grads[0]}  # type: ignore


def legal(exchanges: Sequence[str], feedbacks: Sequence[str], said: Sequence[str]) -> Iterator[Method]:
    """All combinations that a method does not refuse."""
    for exchange in exchanges:
        for feedback in feedbacks:
            for spec in ("fp32",) if parse(exchange).late else said:
                try:
                    yield method(spec, feedback, exchange)
                except ValueError as refused:
                    assert "use" in str(refused)


def speaks(exchange: Exchange) -> bool:
    return not isinstance(exchange, Noop)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_all_ranks_agree_to_the_last_bit(exchange: str) -> None:
    worlds = cycle(WORLDS)
    others = [spec for spec in FEEDBACKS if spec != "residual"]
    combinations = [*legal([exchange], others, FEW), *legal([exchange], ["residual"], MANY)]
    assert {whole.feedback for whole in combinations} == set(map(parse, FEEDBACKS))
    for whole in combinations:
        world = next(worlds)
        group = Group(whole, world)
        for step in range(2):
            first, *rest = group.step(gradients(world, step))
            assert not first.skipped and {name: x.shape for name, x in first.updates.items()} == SHAPES
            assert all(x.dtype == torch.float32 and x.isfinite().all() for x in first.updates.values()), str(whole)
            for other in rest if speaks(whole.exchange) else []:
                assert all(_same_bits(x, other.updates[name]) for name, x in first.updates.items()), str(whole)
        _assert_common_memories_agree(group)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def _assert_common_memories_agree(group: Group) -> None:
    first, *others = group.sessions
    for i, lane in enumerate(first.plan.lanes):
        for name, slot in lane.slots(first.world).items():
            if slot.reshard == "same" and speaks(lane.table[0][2]):
                assert all(torch.equal(first.memories[i][name], other.memories[i][name]) for other in others), name


@settings(max_examples=50)
@given(
    spec=st.sampled_from(list(CODECS)),
    exchange=st.sampled_from([spec for spec in EXCHANGES if not parse(spec).late]),
    feedback=st.sampled_from(FEEDBACKS),
    kind=st.sampled_from(["normal", "zeros", "spike", "denormal", "huge", "bf16", "strided"]),
    world=st.sampled_from(WORLDS),
)
def test_any_legal_lane_takes_any_gradient(spec: str, exchange: str, feedback: str, kind: str, world: int) -> None:
    try:
        whole = method(spec, feedback, exchange)
    except ValueError:
        return
    group = Group(whole, world)
    for step in range(2):
        grads = gradients(world, step, kind)
        before = [{name: x.clone() for name, x in grad.items() if x is not None} for grad in grads]
        states = torch.get_rng_state(), random.getstate()
        verdicts = group.step(grads)
        assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
        assert all(torch.equal(x, old[name]) for g, old in zip(grads, before, strict=True) for name, x in g.items())
        assert all(x.isfinite().all() for verdict in verdicts for x in verdict.updates.values())
        if speaks(whole.exchange):
            assert all(_same_bits(x, v.updates[name]) for v in verdicts for name, x in verdicts[0].updates.items())


@pytest.mark.parametrize("spec", ["fp16", "bf16", "hadamard | fp16", "randomk(0.3, unbiased=True) | fp16", "fp32"])
def test_sums_stay_finite(spec: str) -> None:
    for world in WORLDS:
        for kind in ("huge", "constant"):
            group = Group(method(spec, "residual", "allreduce"), world)
            for step in range(2):
                grads = [{name: x * 1e7 for name, x in g.items()} for g in gradients(world, step, kind)]  # type: ignore
                updates = group.step(grads)[0].updates
                assert all(x.isfinite().all() for x in updates.values()), f"{spec} at {world} ranks, {kind}"
                assert group.debts().isfinite().all()


@pytest.mark.parametrize("world", WORLDS)
def test_exact_exchanges_give_the_mean_of_fp32(world: int) -> None:
    exact = [spec for spec in EXCHANGES if parse(spec).exact]
    assert {"allreduce", "allgather", "two_way"} <= set(exact)
    grads = gradients(world, 0)
    for exchange in (*exact, "auto"):
        for granularity in ("layer", "bucket", "model"):
            group = Group(method("fp32", "none", exchange), world, granularity=granularity)
            updates = group.step(grads)[0].updates
            for name, mean in mean_of(grads).items():
                assert torch.allclose(updates[name].double(), mean, rtol=1e-6, atol=1e-6), f"{exchange}, {granularity}"


@pytest.mark.parametrize("world", WORLDS)
def test_one_element_is_enough_for_any_world(world: int) -> None:
    shapes = {"x": (1,)}
    for whole in legal(EXCHANGES, ["none", "residual"], FEW):
        group = Group(whole, world, shapes)
        verdicts = group.step(gradients(world, 0, shapes=shapes))
        assert all(verdict.updates["x"].shape == (1,) for verdict in verdicts)


@pytest.mark.parametrize("exchange", ["allgather", "two_way", "allreduce", "powersgd", "delayed"])
def test_nothing_is_lost_between_gradients_and_updates(exchange: str) -> None:
    """Sum of updates + mean debt = sum of mean gradients: the law that makes error feedback work."""
    said = ("fp32", "sign", "qsgd(biased=True)", "topk(0.3)", "topk(0.3) | sign | int32", "randomk(0.3)", "int4")
    chosen = [spec for spec in said if codec(spec).traits.contraction]
    assert len(chosen) == len(said)
    for whole, worlds in zip(legal([exchange], ["residual"], chosen), cycle(PAIRS)):
        for world in worlds:
            _assert_conserved(Group(whole, world), world, mean_of, str(whole))


def _assert_conserved(group: Group, world: int, meant_of: Meaning, label: str, steps: int = 3) -> None:
    meant, given = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    for step in range(steps):
        grads = gradients(world, step)
        meant = meant + group.flat(meant_of(grads))
        given = given + group.flat(group.step(grads)[0].updates)
    assert torch.allclose(given + group.debts(), meant, atol=2e-5), f"{label} at {world} ranks"


def test_casts_conserve_to_their_own_rounding() -> None:
    """A sum of halves rounds on the wire, where no rank can see it: the debt holds the cast's error, not the sum's."""
    for spec, eps in (("fp16", 2.0**-10), ("bf16", 2.0**-7)):
        for world in WORLDS:
            group = Group(method(spec, "residual", "allreduce"), world)
            grads = gradients(world, 0)
            updates = group.flat(group.step(grads)[0].updates)
            error = (updates + group.debts() - group.flat(mean_of(grads))).abs()
            assert (error <= world * eps * 4).all()


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("exchange", ["allgather", "two_way", "allreduce", "powersgd", "delayed"])
def test_momentum_correction_conserves_velocity(exchange: str, nesterov: bool) -> None:
    """As above, of velocities; masking would remove some of them on purpose, so it is off."""
    feedback = MomentumCorrection(0.8, nesterov=nesterov, masking=False)
    for whole in legal([exchange], [str(feedback)], ["fp32", "topk(0.3) | int32", "topk(0.3) | sign", "randomk(0.3)"]):
        for world in (2, 3):
            velocity: dict[str, Tensor] = {}

            def spoken(grads: Sequence[Grads], velocity: dict[str, Tensor] = velocity) -> dict[str, Tensor]:
                said = {}
                for name, g in mean_of(grads).items():
                    u = velocity.get(name, torch.zeros_like(g))
                    velocity[name] = 0.8 * (u + g) if nesterov else 0.8 * u + g
                    said[name] = velocity[name] + g if nesterov else velocity[name]
                return said

            _assert_conserved(Group(whole, world), world, spoken, str(whole))


@pytest.mark.parametrize("exchange", ["allgather", "two_way", "powersgd"])
def test_the_group_knows_the_mean_of_all_estimates(exchange: str) -> None:
    """EF21 owes nothing, but what the group believes (with what servers still hold) is the mean of beliefs."""
    for whole in legal([exchange], ["ef21"], ["sign", "topk(0.3) | int32"]):
        for world in (1, 2, 5):
            group = Group(whole, world)
            for step in range(3):
                group.step(gradients(world, step))
            for i in range(len(group.sessions[0].memories)):
                estimates = torch.stack([session.memories[i]["estimate"] for session in group.sessions]).mean(0)
                served = torch.stack([group._debt(session, i) for session in group.sessions]).mean(0)
                known = group.sessions[0].memories[i]["estimate_mean"]
                assert torch.allclose(known + served, estimates, atol=1e-5), f"{whole} at {world} ranks"


@pytest.mark.parametrize("exchange", [spec for spec in EXCHANGES if speaks(parse(spec))])
def test_a_broken_gradient_anywhere_changes_nothing_anywhere(exchange: str) -> None:
    for whole in legal([exchange], ["residual", "ef21"], ["fp32", "sign", "topk(0.3)"]):
        group = Group(whole, 3)
        group.step(gradients(3, 0))
        before = [[dict(memory) for memory in session.memories] for session in group.sessions]
        grads = gradients(3, 1)
        grads[1]["b.weight"][0] = float("nan")  # type: ignore[index]
        verdicts = group.step(grads)
        assert all(verdict.skipped and not any(x.any() for x in verdict.updates.values()) for verdict in verdicts)
        for session, memories in zip(group.sessions, before, strict=True):
            for now, then in zip(session.memories, memories, strict=True):
                assert now.keys() == then.keys() and all(torch.equal(now[name], then[name]) for name in now)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_parameter_without_gradient_is_left_out_only_if_nobody_has_one(exchange: str) -> None:
    for whole in legal([exchange], ["residual"], ["fp32", "sign", "topk(0.3)"]):
        group = Group(whole, 2)
        grads = [dict(grad) for grad in gradients(2, 0)]
        grads[0]["a.bias"] = grads[1]["a.bias"] = None
        grads[1]["c"] = None
        verdicts = group.step(grads)
        assert "a.bias" not in verdicts[0].updates
        if speaks(whole.exchange):
            assert all(verdict.updates.keys() == SHAPES.keys() - {"a.bias"} for verdict in verdicts)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_the_same_run_gives_the_same_bits(exchange: str) -> None:
    for whole in legal([exchange], ["residual"], ["qsgd", "sign", "randomk(0.3)", "topk(0.3) | terngrad | int32"]):
        runs = []
        for _ in range(2):
            group = Group(whole, 3)
            runs.append([group.flat(group.step(gradients(3, step))[1].updates) for step in range(2)])
        assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True)), str(whole)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_exchanges_have_one_spelling(exchange: str) -> None:
    assert parse(str(parse(exchange))) == parse(exchange)


@pytest.mark.parametrize("exchange", ["allreduce", "allgather", "powersgd"])
def test_traffic_is_as_predicted_but_for_one_complaint(exchange: str) -> None:
    for world in WORLDS:
        group = Group(method("powersgd") if exchange == "powersgd" else method("fp32", "none", exchange), world)
        group.step(gradients(world, 0))
        plan = group.sessions[0].plan
        predicted = sum(
            made.traffic(chain, lane.tensors, world) for lane in plan.lanes for _, chain, made in lane.table
        )
        measured = group.lockstep.traffic[0].sent
        rider = len(plan.launches) * (world - 1) * (1 if exchange == "allgather" else 8 / world)
        assert measured == pytest.approx(predicted + rider)


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
def test_shards_begin_with_a_byte_of_their_own_whatever_the_code(n: int, world: int) -> None:
    cuts = [shard(n, world, rank) for rank in range(world)]
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
