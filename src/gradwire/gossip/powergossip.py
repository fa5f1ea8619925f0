"""PowerGossip: each edge exchanges one vector per matrix, a step of power iteration on the difference of two models.

Paper:    Vogels, Karimireddy, Jaggi, "PowerGossip: practical low-rank communication compression in decentralized deep
          learning", NeurIPS 2020. https://arxiv.org/abs/2008.01425, Algorithm 1
Formula:  of an edge (i, j), D = X_j - X_i, and in turn
              p = D v;   X_i = X_i + w_ij p v';   u = p / |p|
              r = D' u;  X_i = X_i + w_ij u r';   v = r / |r|
Wire:     rows or columns float32 per matrix and edge, in turn; other tensors dense float32
Traits:   its own compression, no codec; static symmetric graphs; no consensus step: what each edge adds is a projection
          of the difference, times w_ij; a left and a right vector per matrix and edge; keeps the mean over ranks
Differs:  a matrix that a pair of vectors would not shrink travels dense; a vector that became zero is drawn anew; with
          iterations > 1 several iterations follow each other in a step
Spec:     powergossip(ring), powergossip(ring, iterations=2)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from gradwire.codecs.codec import Codec
from gradwire.codecs.stage import Memory, StateSpec
from gradwire.core.payload import Payload, as_bytes, from_bytes
from gradwire.core.registry import register
from gradwire.core.requests import CommGenerator
from gradwire.core.segments import Segments
from gradwire.gossip.gossip import GossipContext, GossipMethod, MixResult
from gradwire.gossip.message import exchange_messages
from gradwire.gossip.requirements import require_static_symmetric
from gradwire.kernels import philox
from gradwire.topology import Graph, Topology


@register("powergossip", kind="gossip")
@dataclass(frozen=True)
class PowerGossip(GossipMethod):
    """Rank-one gossip without anything to tune.

    Attributes:
        graph: Which ranks exchange messages.
        iterations: Messages per step and edge.
    """

    graph: Graph
    iterations: int = 1
    examples: ClassVar[tuple[str, ...]] = ("powergossip(ring)", "powergossip(ring, iterations=2)")
    compresses: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.iterations, int) or isinstance(self.iterations, bool) or self.iterations < 1:
            raise ValueError(f"powergossip takes a whole number of iterations from 1, not {self.iterations!r}")

    def check(self, codec: Codec, topology: Topology) -> None:
        if not codec.traits.lossless:
            raise ValueError(f"powergossip compresses by itself; leave the codec {codec} out")
        require_static_symmetric(self, topology)

    def state_specs(self, context: GossipContext) -> dict[str, StateSpec]:
        left, right = (tuple(side(shape, i) for shape in context.tensors.shapes) for i in (0, 1))
        peers = sorted(context.topology.peers(context.rank))
        return {f"left_{peer}": StateSpec(left) for peer in peers} | {
            f"right_{peer}": StateSpec(right) for peer in peers
        }

    def initial_memory(self, common: Tensor, codec: Codec, context: GossipContext) -> dict[str, Tensor]:
        return {name: common.new_zeros(sum(spec.lengths)) for name, spec in self.state_specs(context).items()}

    def body_bytes(self, tensors: Segments, onto_right: bool) -> int:
        """The length of a message without its header: X v or X' u of every matrix, and all other tensors."""
        return 4 * sum((p.rows if onto_right else p.columns) if p.rows else p.length for p in _matrices(tensors))

    def mix(self, x: Tensor, memory: Memory, codec: Codec, context: GossipContext) -> CommGenerator[MixResult]:
        memory = dict(memory)
        table = _matrices(context.tensors)
        for iteration in range(self.iterations):
            onto_right = (context.key.step * self.iterations + iteration) % 2 == 0
            x = yield from self._iterate(x, memory, table, onto_right, context, iteration)
        return MixResult(x, memory)

    def _iterate(
        self,
        x: Tensor,
        memory: dict[str, Tensor],
        table: list["MatrixSlice"],
        onto_right: bool,
        context: GossipContext,
        iteration: int,
    ) -> CommGenerator[Tensor]:
        used, updated = ("right", "left") if onto_right else ("left", "right")
        bases = {
            peer: _nonzero(memory[f"{used}_{peer}"], table, onto_right, context, peer) for peer in context.in_weights
        }
        mine = {peer: _project(x, table, basis, onto_right) for peer, basis in bases.items()}
        bodies = {peer: Payload(as_bytes(flat)) for peer, flat in mine.items()}
        sizes: Mapping[int, int | None] = {peer: body.nbytes for peer, body in bodies.items()}
        received = yield from exchange_messages(context.header(iteration), bodies, sizes)
        moved = x
        for peer, weight in context.in_weights.items():
            theirs = from_bytes(received[peer].body.data, torch.float32)
            # Both ends subtract the lower rank's from the higher's: they find the same vectors, bit for bit.
            between = theirs - mine[peer] if context.rank < peer else mine[peer] - theirs
            toward = weight if context.rank < peer else -weight
            moved = moved + toward * _expand(between, table, bases[peer], onto_right, x)
            memory[f"{updated}_{peer}"] = _normalized(between, table, onto_right, memory[f"{updated}_{peer}"])
        return moved


class MatrixSlice(NamedTuple):
    """A tensor in the flat buffer; ``rows`` is 0 for one that travels dense."""

    name: str
    start: int
    length: int
    rows: int
    columns: int


def side(shape: tuple[int, ...], i: int) -> int:
    """Rows or columns of a tensor that is worth factoring; else 0."""
    if len(shape) < 2:
        return 0
    rows, columns = shape[0], 1
    for n in shape[1:]:
        columns *= n
    return (rows, columns)[i] if rows + columns < rows * columns else 0


def _matrices(tensors: Segments) -> list[MatrixSlice]:
    spans = zip(tensors.names, tensors.shapes, tensors.offsets[:-1], tensors.lengths, strict=True)
    return [MatrixSlice(name, start, n, side(shape, 0), side(shape, 1)) for name, shape, start, n in spans]


def _vectors(flat: Tensor, table: list[MatrixSlice], right: bool) -> list[Tensor]:
    """A buffer of left or right vectors, cut up; empty for dense tensors."""
    return list(flat.split([place.columns if right else place.rows for place in table]))


def _nonzero(basis: Tensor, table: list[MatrixSlice], right: bool, context: GossipContext, peer: int) -> Tensor:
    """The basis, its zero vectors drawn anew by both ends alike."""
    edge = "-".join(map(str, sorted((context.rank, peer))))
    key = context.key.shared().fold(f"edge {edge}")
    out = []
    for place, v in zip(table, _vectors(basis, table, right), strict=True):
        if v.numel() and not bool(v.any()):
            v = philox.normal(key, (place.name,), v.numel(), v.device)[0]
            v = v / v.norm()
        out.append(v)
    return torch.cat(out)


def _project(x: Tensor, table: list[MatrixSlice], basis: Tensor, right: bool) -> Tensor:
    """X v or X' u of every matrix, other tensors as they are, laid end to end."""
    parts = []
    for place, v in zip(table, _vectors(basis, table, right), strict=True):
        flat = x[place.start : place.start + place.length]
        if place.rows:
            matrix = flat.view(place.rows, place.columns)
            flat = matrix @ v if right else matrix.T @ v
        parts.append(flat)
    return torch.cat(parts)


def _parts(between: Tensor, table: list[MatrixSlice], right: bool) -> list[Tensor]:
    return list(between.split([(p.rows if right else p.columns) if p.rows else p.length for p in table]))


def _expand(between: Tensor, table: list[MatrixSlice], basis: Tensor, right: bool, like: Tensor) -> Tensor:
    """The projected difference, as a flat buffer of models."""
    out = torch.empty_like(like)
    vectors = _vectors(basis, table, right)
    for place, v, p in zip(table, vectors, _parts(between, table, right), strict=True):
        if place.rows:
            p = (torch.outer(p, v) if right else torch.outer(v, p)).flatten()
        out[place.start : place.start + place.length] = p
    return out


def _normalized(between: Tensor, table: list[MatrixSlice], right: bool, old: Tensor) -> Tensor:
    """The other side's vectors for the next iteration; where models agree, the old ones stay."""
    out = []
    rows = zip(table, _parts(between, table, right), _vectors(old, table, not right), strict=True)
    for place, p, before in rows:
        if place.rows:
            norm = p.norm()
            out.append(torch.where(norm > 0, p / norm.clamp(min=torch.finfo(p.dtype).tiny), before))
    return torch.cat([old.new_zeros(0), *out])
