"""Prediction: what a plan will send, before anything is sent."""

from typing import NamedTuple

from gradwire.core.segments import Segments
from gradwire.engine import Lane, Plan


class Forecast(NamedTuple):
    """Bytes of one step of one rank; upper bounds where the data decide."""

    payload: float
    sent: float
    dense: int
    bounded: bool


def forecast(lane: Lane, world: int, step: int) -> Forecast:
    """One lane at one step."""
    codec, exchange = lane.at(step)
    # Of two ranks, each sends a ring its payload once: that is how low-rank factors are counted.
    payload = exchange.traffic(codec, lane.units, 2) if exchange.compresses_in_protocol else codec.size(lane.units)
    sent = exchange.traffic(codec, lane.units, world) if world > 1 else 0.0
    return Forecast(payload, sent, 4 * lane.units.total, not exchange.compresses_in_protocol and not codec.traits.fixed)


def total(plan: Plan, step: int) -> Forecast:
    """All lanes at one step."""
    payload, sent, dense, bounded = zip(*(forecast(lane, plan.world, step) for lane in plan.lanes), strict=True)
    return Forecast(sum(payload), sum(sent), sum(dense), any(bounded))


def stages(plan: Plan) -> list[int]:
    """The steps at which some lane changes its codec."""
    return sorted({step for lane in plan.lanes for step, _, _ in lane.step_table})


def bytes_by_layer(plan: Plan, step: int) -> dict[str, int]:
    """Payload bytes of each parameter in one step. A lane that is compressed as one is shared out by length."""
    sizes: dict[str, int] = {}
    for lane in plan.lanes:
        codec, exchange = lane.at(step)
        whole = forecast(lane, plan.world, step).payload
        single = len(lane.units) == len(lane.tensors) and not exchange.compresses_in_protocol
        for name, shape, n in zip(lane.tensors.names, lane.tensors.shapes, lane.tensors.lengths, strict=True):
            alone = codec.size(Segments((name,), (shape,))) if single else whole * n / lane.units.total
            sizes[name] = round(alone)
    return sizes
