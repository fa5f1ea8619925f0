"""PowerGossip: each edge exchanges one vector per matrix, a step of power iteration on the difference of two models.

Paper:    Vogels, Karimireddy, Jaggi, "PowerGossip: practical low-rank communication compression in decentralized deep
          learning", NeurIPS 2020. https://arxiv.org/abs/2008.01425, Algorithm 1
Formula:  of an edge (i, j), D = X_j - X_i, and in turn
              p = D v;   X_i = X_i + w_ij p v';   u = p / |p|
              r = D' u;  X_i = X_i + w_ij u r';   v = r / |r|
Wire:     rows or columns float32 per matrix and edge, in turn; other tensors dense float32
Traits:   its own compression, no codec; static symmetric graphs; no consensus step: what each edge adds is a projection
          of the difference, times w_ij; a left and a right vector per matrix and edge; keeps the mean over ranks
Differs:  a matrix that a pair of vectors would not shrink travels dense; a vector that became zero is drawn again; with
          iterations > 1 several iterations follow each other in a step
Spec:     powergossip(ring), powergossip(ring, iterations=2)
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.codecs import Codec, Memory, StateSpec
from gradwire.core import CommGenerator, Payload, Segments, as_bytes, check_argument, from_bytes, is_count, register
from gradwire.core.segments import matrix_shape
from gradwire.gossip.gossip import GossipMethod, MixResult
from gradwire.gossip.message import GossipContext, exchange_messages
from gradwire.gossip.requirements import require_static_symmetric
from gradwire.kernels import philox
from gradwire.topology import Topology


@register("powergossip", kind="gossip")
class PowerGossip(GossipMethod):
    """Rank-one gossip without anything to tune.

    Attributes:
        iterations: Messages per step and edge.
    """

    iterations: int = 1
    examples = ("powergossip(ring)", "powergossip(ring, iterations=2)")
    compresses = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_argument(self, "iterations", is_count(self.iterations), "a whole number from 1")

    def check(self, codec: Codec, topology: Topology) -> None:
        if not codec.traits.lossless:
            raise ValueError(f"powergossip compresses by itself; leave the codec {codec} out")
        require_static_symmetric(self, topology)

    def state_specs(self, context: GossipContext) -> dict[str, StateSpec]:
        table, peers = _matrices(context.tensors), sorted(context.topology.peers(context.rank))
        left, right = StateSpec(tuple(m.rows for m in table)), StateSpec(tuple(m.columns for m in table))
        return {f"left_{peer}": left for peer in peers} | {f"right_{peer}": right for peer in peers}

    def initial_memory(self, common: Tensor, codec: Codec, context: GossipContext) -> dict[str, Tensor]:
        return {name: common.new_zeros(sum(spec.lengths)) for name, spec in self.state_specs(context).items()}

    def body_bytes(self, tensors: Segments, onto_right: bool) -> int:
        """The length of a message without its header: X v or X' u of every matrix, and all other tensors."""
        return 4 * sum(matrix.projected(onto_right) for matrix in _matrices(tensors))

    def mix(self, x: Tensor, memory: Memory, codec: Codec, context: GossipContext) -> CommGenerator[MixResult]:
        memory = dict(memory)
        table = _matrices(context.tensors)
        for iteration in range(self.iterations):
            x = yield from self._iterate(x, memory, table, context, iteration)
        return MixResult(x, memory)

    def _iterate(
        self, x: Tensor, memory: dict[str, Tensor], table: list["MatrixShape"], context: GossipContext, iteration: int
    ) -> CommGenerator[Tensor]:
        onto_right = (context.key.step * self.iterations + iteration) % 2 == 0
        used, updated = ("right", "left") if onto_right else ("left", "right")
        bases = {
            peer: _nonzero(memory[f"{used}_{peer}"], table, onto_right, context, peer) for peer in context.in_weights
        }
        mine = {peer: _project(x, table, basis, onto_right) for peer, basis in bases.items()}
        bodies = {peer: Payload(as_bytes(flat)) for peer, flat in mine.items()}
        sizes: Mapping[int, int | None] = {peer: body.nbytes for peer, body in bodies.items()}
        received = yield from exchange_messages(context, bodies, sizes, iteration=iteration)
        moved = x
        for peer, weight in context.in_weights.items():
            theirs = from_bytes(received[peer].body.data, torch.float32)
            # Both ends subtract the lower rank's from the higher's: they find the same vectors, bit for bit.
            between = theirs - mine[peer] if context.rank < peer else mine[peer] - theirs
            toward = weight if context.rank < peer else -weight
            moved = moved + toward * _expand(between, table, bases[peer], onto_right)
            memory[f"{updated}_{peer}"] = _normalized(between, table, onto_right, memory[f"{updated}_{peer}"])
        return moved


class MatrixShape(NamedTuple):
    """A tensor as a matrix; ``rows`` and ``columns`` are 0 for one that travels dense."""

    name: str
    length: int
    rows: int
    columns: int

    def projected(self, right: bool) -> int:
        """How many numbers are sent: X v or X' u, or the whole tensor."""
        return (self.rows if right else self.columns) or self.length


def _matrices(tensors: Segments) -> list[MatrixShape]:
    """The tensors; those that a pair of vectors would not shrink travel dense."""
    sides = map(matrix_shape, tensors.shapes)
    worth = [(rows, columns) if rows + columns < rows * columns else (0, 0) for rows, columns in sides]
    return [MatrixShape(name, n, *side) for name, n, side in zip(tensors.names, tensors.lengths, worth, strict=True)]


def _vectors(flat: Tensor, table: list[MatrixShape], right: bool) -> list[Tensor]:
    """A buffer of left or right vectors, cut up; empty for dense tensors."""
    return list(flat.split([matrix.columns if right else matrix.rows for matrix in table]))


def _projections(flat: Tensor, table: list[MatrixShape], right: bool) -> list[Tensor]:
    """A message, cut up."""
    return list(flat.split([matrix.projected(right) for matrix in table]))


def _nonzero(basis: Tensor, table: list[MatrixShape], right: bool, context: GossipContext, peer: int) -> Tensor:
    """The basis, its zero vectors drawn again, equally by both ends."""
    edge = "-".join(map(str, sorted((context.rank, peer))))
    key = context.key.shared().fold(f"edge {edge}")
    out = []
    for matrix, v in zip(table, _vectors(basis, table, right), strict=True):
        if v.numel() and not bool(v.any()):
            v = philox.normal(key, (matrix.name,), v.numel(), v.device)[0]
            v = v / v.norm()
        out.append(v)
    return torch.cat(out)


def _project(x: Tensor, table: list[MatrixShape], basis: Tensor, right: bool) -> Tensor:
    """X v or X' u of every matrix, other tensors as they are, laid end to end."""
    parts = []
    for matrix, flat, v in zip(table, x.split([m.length for m in table]), _vectors(basis, table, right), strict=True):
        if matrix.rows:
            square = flat.view(matrix.rows, matrix.columns)
            flat = square @ v if right else square.T @ v
        parts.append(flat)
    return torch.cat(parts)


def _expand(between: Tensor, table: list[MatrixShape], basis: Tensor, right: bool) -> Tensor:
    """The projected difference, as a flat buffer of models."""
    parts = []
    for v, p in zip(_vectors(basis, table, right), _projections(between, table, right), strict=True):
        dense = not v.numel()
        parts.append(p if dense else (torch.outer(p, v) if right else torch.outer(v, p)).flatten())
    return torch.cat(parts)


def _normalized(between: Tensor, table: list[MatrixShape], right: bool, old: Tensor) -> Tensor:
    """The other side's vectors for the next iteration; where models agree, the old ones stay."""
    out = []
    for p, before in zip(_projections(between, table, right), _vectors(old, table, not right), strict=True):
        if before.numel():
            norm = p.norm()
            out.append(torch.where(norm > 0, p / norm.clamp(min=torch.finfo(p.dtype).tiny), before))
    return torch.cat([old.new_zeros(0), *out])
