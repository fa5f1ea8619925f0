"""Batched equals lockstep: the same updates, state, traffic and accounts as rank by rank, bit for bit."""

import pytest
import torch
from torch import nn

import gradwire
from gradwire.engine import Lockstep
from gradwire.engine.batched import Batched
from gradwire.engine.plan import Rule
from gradwire.integrations.setup import Options, Setup
from gradwire.integrations.simulated import SimulatedBackend
from gradwire.integrations.wire import Wire

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = {"a.weight": (40, 33), "a.bias": (40,), "b.weight": (7, 40), "b.bias": (7,), "c": (501,)}
CASES = {
    "dense": {"spec": "dense"},
    "bf16": {"spec": "bf16"},
    "topk": {"spec": "topk(0.05)"},
    "topk, whole model, no feedback": {"spec": "topk(0.5) | bitmap", "feedback": "none", "granularity": "model"},
    "topk, whole model, rows": {"spec": "topk(0.05) | rows", "granularity": "model"},
    "topk of signs": {"spec": "topk(0.05) | sign"},
    "topk, int32, two-way": {"spec": "topk(0.05) | int32", "exchange": "two_way"},
    "dgc": {"spec": "dgc(0.01)"},
    "dgc, nesterov, fp16": {"spec": "dgc(0.01, nesterov=True, masking=False, values=fp16, indices=int32)"},
    "a ramp": {"spec": "dgc(0.01, ramp=3)"},
    "random, by rank": {"spec": "randomk(0.3, shared=False)"},
    "random, shared": {"spec": "randomk(0.1)"},
    "random, unbiased": {"spec": "randomk(0.1, unbiased=True)", "feedback": "none"},
    "threshold": {"spec": "threshold(0.9)"},
    "adacomp": {"spec": "adacomp(50) | terngrad"},
    "variance": {"spec": "variance(1.0)"},
    "sampled": {"spec": "sampled_topk(0.05)"},
    "signs": {"spec": "ef_signsgd"},
    "signs, gathered": {"spec": "sign", "exchange": "allgather"},
    "terngrad": {"spec": "terngrad(clip=0)", "feedback": "none"},
    "qsgd": {"spec": "qsgd(levels=255, bucket=None)", "feedback": "none"},
    "qsgd, whole model, gathered": {"spec": "qsgd", "granularity": "model", "exchange": "allgather"},
    "int4": {"spec": "int4"},
    "natural": {"spec": "natural", "feedback": "none"},
    "onebit": {"spec": "onebit"},
    "ef21": {"spec": "topk(0.1)", "feedback": "ef21"},
    "ef21 with momentum": {"spec": "ef21_sgdm(0.1)"},
    "two rules, several buckets": {"spec": "topk(0.05)", "rules": [Rule("sign", name="b.*")], "bucket_mb": 600 / 2**20},
}
UNSUPPORTED = {
    "powersgd": {"spec": "powersgd(2)"},
    "rotated": {"spec": "hadamard | sign"},
    "delayed": {"spec": "topk(0.1)", "exchange": "delayed"},
    "gap16": {"spec": "topk(0.1) | gap16"},
    "clipped": {"spec": "dgc(0.01, clip=1.0)"},
    "majority": {"spec": "majority_vote"},
}


def make_wires(world, case):
    group = Lockstep(world)
    wires = []
    for rank in range(world):
        parameters = {name: nn.Parameter(torch.zeros(shape, device=DEVICE)) for name, shape in SHAPES.items()}
        options = {"seed": 5, **case}
        spec = options.pop("spec")
        wires.append(Wire(Setup(parameters, SimulatedBackend(group, rank), Options(**options)), spec))
    return group, wires


def batched_of(group, wires):
    return Batched([wire.engine for wire in wires], group)


def draw(world, step):
    make = torch.Generator().manual_seed(step)
    return [
        {name: torch.randn(shape, generator=make).to(DEVICE) for name, shape in SHAPES.items()} for _ in range(world)
    ]


def rank_by_rank(group, wires, grads):
    """A step in lockstep, of copies: it overwrites the gradients."""
    own = [{name: x.clone() for name, x in mine.items()} for mine in grads]
    results = group.drive([wire.engine.run(mine) for wire, mine in zip(wires, own, strict=True)])
    for result in results[1:]:
        same(result.updates, results[0].updates)
    return results[0]


def same(a, b):
    assert a.keys() == b.keys()
    for name, x in a.items():
        assert torch.equal(x, b[name]) and torch.equal(x.signbit(), b[name].signbit()), name


def same_accounts(mine, other):
    """Of two wires."""
    assert mine.engine.accounting.encoded == other.engine.accounting.encoded
    assert mine.engine.accounting.dense == other.engine.accounting.dense
    assert vars(mine.link.traffic) == pytest.approx(vars(other.link.traffic), rel=1e-12)  # sums of halves


@pytest.mark.parametrize("world", [1, 2, 5])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_batched_equals_lockstep(case, world):
    group, wires = make_wires(world, case)
    other, others = make_wires(world, case)
    batched = batched_of(group, wires)
    for step in range(5):
        grads = draw(world, step)
        if step == 3:
            grads[-1]["b.weight"][2, 3] = torch.nan  # dropped by all
        assert batched.can_run(grads)
        result, expected = batched.run(grads), rank_by_rank(other, others, grads)
        same(result.updates, expected.updates)
        assert result.skipped == expected.skipped == (step == 3)
        for mine, reference in zip(wires, others, strict=True):
            same(mine.state_dict(), reference.state_dict())
            same_accounts(mine, reference)


@pytest.mark.parametrize("case", UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_unsupported_configurations_are_declined(case):
    group, wires = make_wires(3, case)
    assert not batched_of(group, wires).can_run(draw(3, 0))


def test_a_missing_gradient_is_declined():
    group, wires = make_wires(3, CASES["topk"])
    grads = draw(3, 0)
    grads[2]["c"] = None
    assert not batched_of(group, wires).can_run(grads)


def test_a_carried_error_is_declined():
    group, wires = make_wires(3, CASES["topk"])
    batched = batched_of(group, wires)
    batched.run(draw(3, 0))
    for wire in wires:
        wire.set("topk(0.05)", feedback="none")
    assert all(state.carried_error is not None for state in wires[0].engine.states)
    assert not batched_of(group, wires).can_run(draw(3, 1))
    for state in wires[0].engine.states:
        state.carried_error = None  # as where rank 0 owes nothing
    assert not batched_of(group, wires).can_run(draw(3, 1))


def test_batched_steps_and_lockstep_may_alternate():
    group, wires = make_wires(3, CASES["dgc"])
    other, others = make_wires(3, CASES["dgc"])
    batched = batched_of(group, wires)
    for step in range(6):
        grads = draw(3, step)
        result = batched.run(grads) if step % 3 else rank_by_rank(group, wires, grads)
        same(result.updates, rank_by_rank(other, others, grads).updates)
    for mine, reference in zip(wires, others, strict=True):
        same(mine.state_dict(), reference.state_dict())


def test_observed_moments_are_used():
    group, wires = make_wires(3, CASES["variance"])
    other, others = make_wires(3, CASES["variance"])
    batched = batched_of(group, wires)
    for step in range(5):
        grads = draw(3, step)
        if step != 2:  # without, the gradient itself is taken
            for rank, moments in enumerate(draw(3, 10 + step)):
                for wire in (wires[rank], others[rank]):
                    wire.observe({name: 0.1 * x.square() for name, x in moments.items() if name != "c"})
        if step == 3:
            grads[0]["c"][7] = torch.inf  # dropped by all, with what was observed
        assert batched.can_run(grads)
        same(batched.run(grads).updates, rank_by_rank(other, others, grads).updates)
        for mine, reference in zip(wires, others, strict=True):
            same(mine.state_dict(), reference.state_dict())
            same_accounts(mine, reference)
    wires[1].observe({"c": torch.ones(501, device=DEVICE)})
    assert not batched.can_run(draw(3, 6))


def test_a_gradient_that_was_replaced_is_read_anew() -> None:
    """Gradients that lie end to end are one buffer, until any of them is another tensor."""
    models = [nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)) for _ in range(2)]
    workers = gradwire.lockstep(models, "fp32")
    buffer = torch.zeros(2, 128)
    for rank, model in enumerate(models):  # in the order of the lane, which is that of backward
        model[1].weight.grad, model[0].weight.grad = buffer[rank, :64].view(8, 8), buffer[rank, 64:].view(8, 8)
    workers()
    for model in models:
        model[0].weight.grad = torch.full((8, 8), 5.0)
    workers()
    assert all(torch.equal(model[0].weight.grad, torch.full((8, 8), 5.0)) for model in models)
