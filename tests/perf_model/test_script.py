"""A script told without tensors is what the library really asks of a link."""

import pytest
import torch

from gradwire.engine.plan import Rule, build, default_rules
from gradwire_lab.perf_model.rehearsal import rehearse
from gradwire_lab.perf_model.script import script, sent

SHAPES = {"embed": (60, 16), "wide": (40, 50), "bias": (40,), "deep": (32, 8, 3, 3), "norm": (32,), "head": (10, 32)}
FIXED = ("fp32", "bf16", "int8", "int4", "sign", "powersgd(2)", "randomk(0.1)", "topk(0.1) | int32", "majority_vote")
VARYING = ("topk(0.1)", "topk(0.05) | sign", "dgc(0.1)")


def grads() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("spec", FIXED)
def test_collectives_are_foretold(spec: str, world: int) -> None:
    plan = build(SHAPES, default_rules(spec), world, launch_bytes=12_000)
    assert len(plan.launches) > 1
    told = [message for scene in script(plan, 0) for message in scene.messages]
    held = rehearse(plan, grads(), repeats=1).messages
    assert [(m.kind, m.dtype) for m in told] == [(m.kind, m.dtype) for m in held]
    assert [m.nbytes for m in told] == pytest.approx([m.nbytes for m in held])


@pytest.mark.parametrize("spec", VARYING)
def test_where_data_decide_the_script_is_an_upper_bound(spec: str) -> None:
    plan = build(SHAPES, default_rules(spec), 4)
    scenes = script(plan, 0)
    held = rehearse(plan, grads(), repeats=1).messages
    told = [message for scene in scenes for message in scene.messages]
    assert [m.kind for m in told] == [m.kind for m in held]
    assert all(t.nbytes >= h.nbytes for t, h in zip(told, held, strict=True))
    assert sent(scenes, 4) < 1.5 * 3 * sum(m.nbytes for m in held)


def test_a_sent_byte_is_what_exchanges_promise() -> None:
    """The whole of a step, less the complaints that ride along."""
    for spec in ("bf16", "int4", "powersgd(2)"):
        plan = build(SHAPES, (Rule(spec),), 4)
        promised = sum(lane.at(0)[1].traffic(lane.at(0)[0], lane.units, 4) for lane in plan.lanes)
        assert sent(script(plan, 0), 4) == pytest.approx(promised, rel=0.03, abs=8)
