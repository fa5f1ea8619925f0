"""Script: which collectives a plan will hold at a step, launch by launch, and how many bytes each carries.

It is what `links.collectives.fuse` makes of the asks of all lanes, told without any tensor, so that it can be written
for models and worlds that fit on no machine at hand. Where only the data tell the length of a message, the script has
the longest.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from gradwire.codecs.codec import Codec
from gradwire.comm.alphabeta import Kind
from gradwire.engine.lane import Lane
from gradwire.engine.plan import Plan
from gradwire.exchanges import AllReduce, Delayed, Exchange, PowerSGD, TwoWay
from gradwire.exchanges.powersgd import basis_length
from gradwire.exchanges.two_way import shard

_LENGTH_BYTES = 8  # an int64 for each message whose length the group must agree on


@dataclass(frozen=True)
class Message:
    """One collective.

    Attributes:
        kind: Which.
        nbytes: Of the tensor that is reduced; of what each rank shows to all; of what it hands to its peers together.
        dtype: Of what is added up; bytes are only moved.
    """

    kind: Kind
    nbytes: float
    dtype: torch.dtype = torch.uint8


@dataclass(frozen=True)
class Scene:
    """One launch: the parameters that it waits for, and what is said, in order."""

    names: tuple[str, ...]
    elements: int
    messages: tuple[Message, ...]


@dataclass(frozen=True)
class Line:
    """What one lane adds to one round. ``varying`` is a message whose length must be agreed on first."""

    kind: Kind
    nbytes: float
    dtype: torch.dtype = torch.uint8
    varying: bool = False


def script(plan: Plan, step: int) -> tuple[Scene, ...]:
    """The whole step of one rank."""
    return tuple(_scene(launch, plan.world, step) for launch in plan.launches)


def sent(scenes: Iterable[Scene], world: int) -> float:
    """Bytes that one rank puts on the wire, by what gloo and NCCL's rings do."""
    return sum(sent_by(message, world) for scene in scenes for message in scene.messages)


def sent_by(message: Message, world: int) -> float:
    """The same for one collective."""
    if message.kind == "all_reduce":
        return 2 * (world - 1) / world * message.nbytes
    return (world - 1) * message.nbytes if message.kind == "all_gather" else message.nbytes


def _scene(lanes: tuple[Lane, ...], world: int, step: int) -> Scene:
    spoken = [_lines(lane, world, step) for lane in lanes]
    rounds = [[lines[i] for lines in spoken if i < len(lines)] for i in range(max(map(len, spoken)))]
    if rounds:
        rounds[0].append(_rider(rounds[0][0], world))
    names = tuple(name for lane in lanes for name in lane.tensors.names)
    messages = tuple(message for lines in rounds for message in _fused(lines))
    return Scene(names, sum(lane.units.total for lane in lanes), messages)


def _lines(lane: Lane, world: int, step: int) -> list[Line]:
    codec, exchange = lane.at(step)
    if isinstance(exchange, Delayed):
        exchange = exchange.inner
    if exchange.silent:
        return []
    if isinstance(exchange, PowerSGD):
        return _low_rank(lane, exchange.rank)
    if isinstance(exchange, AllReduce):
        return [Line("all_reduce", codec.size(lane.units), codec.quantizer.dtype)]  # type: ignore[attr-defined]
    if isinstance(exchange, TwoWay):
        return _two_legs(lane, codec, world)
    if world > 1 and exchange.traffic(codec, lane.units, world) != (world - 1) * codec.size(lane.units):
        return [_unknown(exchange, codec, lane, world)]
    return [Line("all_gather", codec.size(lane.units), varying=not codec.traits.fixed)]


def _unknown(exchange: Exchange, codec: Codec, lane: Lane, world: int) -> Line:
    """An exchange that this file has not heard of, by the bytes that it says it sends: as if summed in one go."""
    share = 2 * (world - 1) / world
    return Line("all_reduce", exchange.traffic(codec, lane.units, world) / share, torch.float32)


def _low_rank(lane: Lane, rank: int) -> list[Line]:
    first = second = 0
    for shape, n in zip(lane.tensors.shapes, lane.tensors.lengths, strict=True):
        columns = basis_length(shape, rank)
        first += rank * shape[0] if columns else n
        second += columns
    return [Line("all_reduce", 4 * n, torch.float32) for n in (first, second) if n]


def _two_legs(lane: Lane, codec: Codec, world: int) -> list[Line]:
    total = lane.units.total
    if world > 64:  # cutting thousands of shards would tell no more than their even share
        whole = codec.size(lane.units)
        return [Line("all_to_all", whole * (world - 1) / world), Line("all_gather", whole / world)]
    sizes = [codec.size(lane.units.window(*shard(total, world, rank))) for rank in range(world)]
    return [Line("all_to_all", sum(sizes) - sizes[0]), Line("all_gather", max(sizes))]


def _rider(first: Line, world: int) -> Line:
    """The complaint that travels with the first ask of a launch."""
    if first.kind == "all_reduce":
        return Line("all_reduce", first.dtype.itemsize, first.dtype)
    return Line("all_gather", 1) if first.kind == "all_gather" else Line("all_to_all", world - 1)


def _fused(lines: list[Line]) -> Iterable[Message]:
    """One collective for each kind and dtype, in the order in which links carry them out."""
    sums: defaultdict[torch.dtype, float] = defaultdict(float)
    for line in lines:
        if line.kind == "all_reduce":
            sums[line.dtype] += line.nbytes
    yield from (Message("all_reduce", nbytes, dtype) for dtype, nbytes in sums.items())
    varying = sum(line.varying for line in lines)
    if varying:
        yield Message("all_reduce", _LENGTH_BYTES * varying, torch.int64)
    for kind in ("all_gather", "all_to_all"):
        total = math.fsum(line.nbytes for line in lines if line.kind == kind)
        if total:
            yield Message("all_gather" if kind == "all_gather" else "all_to_all", total)
