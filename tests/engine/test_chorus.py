"""Ranks in unison: the same updates, memories and account as one after the other, bit for bit."""

import pytest
import torch
from torch import nn

from gradwire.engine import Lockstep
from gradwire.engine.chorus import Chorus
from gradwire.engine.plan import Rule
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
    "topk, int32, two ways": {"spec": "topk(0.05) | int32", "exchange": "two_way"},
    "dgc": {"spec": "dgc(0.01)"},
    "dgc, nesterov, fp16": {"spec": "dgc(0.01, nesterov=True, masking=False, values=fp16, indices=int32)"},
    "a ramp": {"spec": "dgc(0.01, ramp=3)"},
    "random, each its own": {"spec": "randomk(0.3, shared=False)"},
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
    "two rules, many launches": {"spec": "topk(0.05)", "rules": [Rule("sign", name="b.*")], "launch_bytes": 600},
}
DECLINED = {
    "powersgd": {"spec": "powersgd(2)"},
    "ef21": {"spec": "topk(0.1)", "feedback": "ef21"},
    "rotated": {"spec": "hadamard | sign"},
    "delayed": {"spec": "topk(0.1)", "exchange": "delayed"},
    "gap16": {"spec": "topk(0.1) | gap16"},
    "clipped": {"spec": "dgc(0.01, clip=1.0)"},
    "majority": {"spec": "majority_vote"},
}


def crew(world, case):
    group = Lockstep(world)
    wires = []
    for rank in range(world):
        parameters = {name: nn.Parameter(torch.zeros(shape, device=DEVICE)) for name, shape in SHAPES.items()}
        wires.append(Wire(parameters, SimulatedBackend(group, rank), **{"seed": 5, **case}))
    return group, wires


def draw(world, step):
    make = torch.Generator().manual_seed(step)
    return [
        {name: torch.randn(shape, generator=make).to(DEVICE) for name, shape in SHAPES.items()} for _ in range(world)
    ]


def one_by_one(group, wires, grads):
    return group.drive([wire.session.run(own) for wire, own in zip(wires, grads, strict=True)])[0]


def same(a, b):
    assert a.keys() == b.keys()
    for name, x in a.items():
        assert torch.equal(x, b[name]) and torch.equal(x.signbit(), b[name].signbit()), name


@pytest.mark.parametrize("world", [1, 2, 5])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_unison_is_lockstep(case, world):
    group, wires = crew(world, case)
    other, others = crew(world, case)
    chorus = Chorus([wire.session for wire in wires], group)
    for step in range(5):
        grads = draw(world, step)
        if step == 3:
            grads[-1]["b.weight"][2, 3] = torch.nan  # dropped by all
        assert chorus.knows(grads)
        verdict, expected = chorus.step(grads), one_by_one(other, others, grads)
        same(verdict.updates, expected.updates)
        assert verdict.skipped == expected.skipped == (step == 3)
        for rank in range(world):
            same(wires[rank].state_dict(), others[rank].state_dict())
            assert vars(group.traffic[rank]) == pytest.approx(vars(other.traffic[rank]), rel=1e-12)  # sums of halves
            assert wires[rank].session.said == others[rank].session.said
            assert wires[rank].session.meant == others[rank].session.meant


@pytest.mark.parametrize("case", DECLINED.values(), ids=DECLINED)
def test_what_cannot_be_sung_is_declined(case):
    group, wires = crew(3, case)
    assert not Chorus([wire.session for wire in wires], group).knows(draw(3, 0))


def test_a_missing_gradient_is_declined():
    group, wires = crew(3, CASES["topk"])
    grads = draw(3, 0)
    grads[2]["c"] = None
    assert not Chorus([wire.session for wire in wires], group).knows(grads)


def test_steps_in_unison_and_one_by_one_may_alternate():
    group, wires = crew(3, CASES["dgc"])
    other, others = crew(3, CASES["dgc"])
    chorus = Chorus([wire.session for wire in wires], group)
    for step in range(6):
        grads = draw(3, step)
        verdict = chorus.step(grads) if step % 3 else one_by_one(group, wires, grads)
        same(verdict.updates, one_by_one(other, others, grads).updates)
    for mine, theirs in zip(wires, others, strict=True):
        same(mine.state_dict(), theirs.state_dict())


def test_what_loops_observe_is_sung():
    group, wires = crew(3, CASES["variance"])
    other, others = crew(3, CASES["variance"])
    chorus = Chorus([wire.session for wire in wires], group)
    for step in range(5):
        grads = draw(3, step)
        if step != 2:  # without, the gradient itself is taken
            for rank, moments in enumerate(draw(3, 10 + step)):
                for each in (wires[rank], others[rank]):
                    each.observe({name: 0.1 * x.square() for name, x in moments.items() if name != "c"})
        if step == 3:
            grads[0]["c"][7] = torch.inf  # dropped by all, with what was observed
        assert chorus.knows(grads)
        same(chorus.step(grads).updates, one_by_one(other, others, grads).updates)
        for mine, theirs in zip(wires, others, strict=True):
            same(mine.state_dict(), theirs.state_dict())
            assert mine.session.said == theirs.session.said
    wires[1].observe({"c": torch.ones(501, device=DEVICE)})
    assert not chorus.knows(draw(3, 6))
