"""Stages from outside the package, which know tensors alone, and gradients that do not lie end to end."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire.codecs.quantizers import QSGD
from gradwire.codecs.stage import Memory
from gradwire.core.requests import CommGenerator
from gradwire.engine import Engine, Lockstep, Method, build, default_rules, method
from gradwire.exchanges import AllGather, TwoWay
from gradwire.exchanges.exchange import Aggregate
from gradwire.feedback.preconditioned_momentum import PreconditionedMomentum

SHAPES = {"a": (40, 30), "b": (20, 10), "c": (8, 8)}


class HalvedGather(AllGather):
    def run(self, *args: Any) -> CommGenerator[Aggregate]:
        aggregate = yield from super().run(*args)
        assert isinstance(aggregate.mean, Tensor)
        return aggregate._replace(mean=aggregate.mean * 0.5)


class HalvedTwoWay(TwoWay):
    def run(self, *args: Any) -> CommGenerator[Aggregate]:
        aggregate = yield from super().run(*args)
        assert isinstance(aggregate.mean, Tensor)
        return aggregate._replace(mean=aggregate.mean * 0.5)


class ClampedQSGD(QSGD):
    def encode(self, values: Tensor, *rest: Any) -> Tensor:  # type: ignore[override]
        return super().encode(values.clamp(-2.0, 2.0), *rest)


class ClampedMomentum(PreconditionedMomentum):
    def finalize_entries(self, mean: Any, memory: Memory, out: Tensor) -> tuple[Tensor, Memory]:  # type: ignore[override]
        return out.copy_(mean.mean(out.numel()) * memory["denominator"]).clamp_(-1, 1), memory


def means(chosen: Method, world: int, apart: bool) -> list[Tensor]:
    """What rank 0 has after two steps, of gradients that lie apart or end to end."""
    plan = build(SHAPES, default_rules(chosen), world)
    engines = [Engine(plan, rank, world, 1, torch.device("cpu")) for rank in range(world)]
    for state in (state for engine in engines for state in engine.states if "denominator" in state.tensors):
        state.tensors["denominator"].fill_(1.0)
    draw, ranks = torch.Generator().manual_seed(0), list[dict[str, Tensor]]()
    for _ in range(2):
        ranks = [laid({name: torch.randn(s, generator=draw) for name, s in SHAPES.items()}, apart) for _ in engines]
        Lockstep(world).drive([engine.run(grads) for engine, grads in zip(engines, ranks, strict=True)])
    return list(ranks[0].values())


def laid(grads: dict[str, Tensor], apart: bool) -> dict[str, Tensor]:
    flat = torch.cat([grad.flatten() for grad in grads.values()])
    parts = flat.split([grad.numel() for grad in grads.values()])
    views = {name: part.view(grads[name].shape) for name, part in zip(grads, parts, strict=True)}
    return {name: x.clone() for name, x in views.items()} if apart else views


OUTSIDE = {
    "exchange that gathers": method("sign", exchange=HalvedGather()),
    "exchange of two legs": method("sign", exchange=HalvedTwoWay()),
    "quantizer": method(ClampedQSGD(), feedback="none", exchange="allgather"),
    "feedback": method("topk(0.1)", feedback=ClampedMomentum(), exchange="allgather"),
}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", OUTSIDE)
def test_stages_from_outside_get_tensors(name: str, world: int) -> None:
    apart, together = (means(OUTSIDE[name], world, apart) for apart in (True, False))
    assert all(map(torch.equal, apart, together)) and any(bool(x.any()) for x in apart)


@pytest.mark.parametrize("spec", ["dct(side=4) | fp32", "sign"])
@pytest.mark.parametrize("world", [1, 2])
def test_two_legs_of_a_buffer_with_shapes_and_empty_tensors(spec: str, world: int) -> None:
    """A slice that is the whole buffer has its shapes, and the empty tensors in it."""
    shapes = {"a": (4, 5), "b": (0, 4)}
    plan = build(shapes, default_rules(method(spec, feedback="none", exchange="two_way")), world)
    engines = [Engine(plan, rank, world, 1, torch.device("cpu")) for rank in range(world)]
    ranks = [{name: torch.randn(shape) for name, shape in shapes.items()} for _ in engines]
    mean = torch.stack([grads["a"].clone() for grads in ranks]).mean(0)
    Lockstep(world).drive([engine.run(grads) for engine, grads in zip(engines, ranks, strict=True)])
    if spec != "sign":
        torch.testing.assert_close(ranks[0]["a"], mean)
