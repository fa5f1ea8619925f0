"""PowerSGD: one step of power iteration per training step, shared by the group.

Paper:    Vogels, Karimireddy, Jaggi, "PowerSGD: practical low-rank gradient compression for distributed optimization",
          NeurIPS 2019. https://arxiv.org/abs/1905.13727, Algorithms 1 and 2
Formula:  P = mean_r(M_r Q);  P = orthonormal(P);  Q_r = M_r' P;  Q = mean_r(Q_r);  mean = P Q'
Wire:     r (rows + columns) float32 per matrix, in two sums; other tensors dense float32, with the first sum
Traits:   compresses in its protocol: what was sent is known only after the first sum; not exact
Differs:  a matrix that r factors would not shrink travels dense; a basis column that became zero is replaced by the
          one first drawn; the error is that of the rank's own projection P Q_r', whose mean over ranks is the update
Spec:     powersgd(2)
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from gradwire.codecs import Codec, Decoded, Memory, StateSpec
from gradwire.codecs.quantizers import FP32
from gradwire.core import CommGenerator, Key, Segments, Sum, check_argument, is_count, register
from gradwire.core.graph_refs import cached_on_device
from gradwire.core.segments import matrix_shape
from gradwire.exchanges.exchange import Aggregate, CommContext, Exchange, Message
from gradwire.kernels import philox


@dataclass(frozen=True)
class ShapeGroup:
    """All matrices of one shape: where they lie in the flat buffer, and where their bases lie in theirs."""

    rows: int
    columns: int
    starts: tuple[int, ...]
    bases: tuple[int, ...]
    names: tuple[str, ...]


def shape_groups(tensors: Segments, rank: int) -> list[ShapeGroup]:
    """Low-rank work grouped by shape, so that one batched product serves many layers."""
    by_shape: dict[tuple[int, int], list[tuple[int, int, str]]] = defaultdict(list)
    basis = 0
    for name, shape, start in zip(tensors.names, tensors.shapes, tensors.offsets[:-1], strict=True):
        if basis_length(shape, rank):
            by_shape[matrix_shape(shape)].append((start, basis, name))
            basis += basis_length(shape, rank)
    return [
        ShapeGroup(rows, columns, *(tuple(part) for part in zip(*places, strict=True)))
        for (rows, columns), places in by_shape.items()
    ]


def basis_length(shape: tuple[int, ...], rank: int) -> int:
    """Elements of a tensor's Q; 0 for one that is not worth factoring."""
    rows, columns = matrix_shape(shape)
    return columns * rank if rank * (rows + columns) < rows * columns else 0


def orthonormal(p: Tensor) -> Tensor:
    """Gram-Schmidt over the columns of a batch of tall matrices [b, rows, r]; a dependent column becomes zero."""
    done = p.mT.contiguous()  # columns as they lie in memory
    for i in range(done.shape[1]):
        column, others = done[:, i : i + 1], done[:, :i]
        before = column.norm(dim=-1, keepdim=True)
        for _ in range(2 if i else 0):  # once more, since a single pass leaves float32 columns visibly oblique
            column = column - (column @ others.mT) @ others
        norm = column.norm(dim=-1, keepdim=True)
        alive = norm > 1e-6 * before
        done[:, i : i + 1] = torch.where(alive, column / norm.clamp(min=torch.finfo(p.dtype).tiny), 0.0)
    return done.mT


def orthonormal_all(matrices: list[Tensor]) -> list[Tensor]:
    """`orthonormal` of several batches. On a GPU all are made equally tall with zeros, so that one call serves all."""
    if len(matrices) < 2 or matrices[0].device.type == "cpu":
        return [orthonormal(p) for p in matrices]
    most = max(p.shape[1] for p in matrices)
    tall = torch.cat([torch.nn.functional.pad(p, (0, 0, 0, most - p.shape[1])) for p in matrices])
    parts = orthonormal(tall).split([p.shape[0] for p in matrices])
    return [part[:, : p.shape[1]] for part, p in zip(parts, matrices, strict=True)]


@register("powersgd", kind="exchange")
class PowerSGD(Exchange):
    """Agree on a low-rank approximation of the mean, of rank ``rank``."""

    rank: int = 2
    examples = ("powersgd", "powersgd(rank=1)")
    compresses_in_protocol = True
    subtracts_sent = True

    def __post_init__(self) -> None:
        check_argument(self, "rank", is_count(self.rank), "a whole number from 1")

    def check(self, codec: Codec) -> None:
        if codec != Codec.of((FP32(),)):
            raise ValueError(
                f"{self} compresses by itself and would not use {codec}; give '{self}' as the spec instead"
            )

    def state_specs(self, context: CommContext) -> dict[str, StateSpec]:
        lengths = tuple(basis_length(shape, self.rank) for shape in context.tensors.shapes)
        return {"basis": StateSpec(lengths, "same")}

    def run(self, message: Message, codec: Codec, context: CommContext) -> CommGenerator[Aggregate]:
        x, memory = message.content, message.memory
        assert isinstance(x, Tensor)
        shapes = shape_groups(context.tensors, self.rank)
        matrices = [_stack(x, f.starts, f.rows, f.columns) for f in shapes]
        bases = self._bases(shapes, memory, context)
        uncompressed = _uncompressed(context.tensors, self.rank, x.device)

        # Round 1: all ranks' projections onto the shared basis, and what travels dense.
        # Transposed, so that long rows of the matrix are read as they lie: several times faster on a CPU.
        left = [(q.mT @ m.mT).mT for m, q in zip(matrices, bases, strict=True)]
        total = yield Sum(torch.cat([*(p.flatten() for p in left), x[uncompressed]]))
        *summed, dense = total.split([*(p.numel() for p in left), uncompressed.numel()])
        left = orthonormal_all([s.view_as(p) for s, p in zip(summed, left, strict=True)])

        # Round 2: all ranks' coefficients.
        mine = [(p.mT @ m).mT for m, p in zip(matrices, left, strict=True)]
        total = yield Sum(torch.cat([x.new_zeros(0), *(q.flatten() for q in mine)]))
        parts = (total / context.world).split([q.numel() for q in mine])
        right = [s.view_as(q) for s, q in zip(parts, mine, strict=True)]

        # Factored or uncompressed, everything is written.
        subtracts = memory.get("residual") is x
        mean = context.out if subtracts and context.out is not None else torch.empty_like(x)
        own = x if subtracts else torch.empty_like(x)
        if uncompressed.numel():
            own[uncompressed] = 0.0 if subtracts else x[uncompressed]
            mean[uncompressed] = dense / context.world
        for f, p, q, q_own in zip(shapes, left, right, mine, strict=True):
            _multiply_(mean, p, q, f.starts)
            _multiply_(own, p, q_own, f.starts, subtract=subtracts)
        memory = {**memory, "basis": _remember(memory["basis"], shapes, right)}
        return Aggregate(mean, memory, None if subtracts else Decoded(None, own))

    def traffic(self, codec: Codec, units: Segments, world: int) -> float:
        factors = sum(
            self.rank * sum(matrix_shape(shape)) if basis_length(shape, self.rank) else n
            for shape, n in zip(units.shapes, units.lengths, strict=True)
        )
        return 2 * (world - 1) / world * 4 * factors

    def _bases(self, shapes: list[ShapeGroup], memory: Memory, context: CommContext) -> list[Tensor]:
        # The same at every step, and hardly any needs it. A plain key: what is drawn only once may be captured.
        key = context.key.shared().fold("basis")
        fresh = Key(key.seed, 0, key.rank, key.purpose)
        bases = []
        for f in shapes:
            q = _stack(memory["basis"], f.bases, f.columns, self.rank)
            drawn = _drawn(fresh, f.names, f.columns * self.rank, q.device).view_as(q)
            # A column of zeros would stay zero for ever; the first step starts from nothing else.
            bases.append(torch.where(q.norm(dim=-2, keepdim=True) > 0, q, drawn))
        return bases


@cached_on_device(512)
def _drawn(key: Key, names: tuple[str, ...], n: int, device: torch.device) -> Tensor:
    if device.type == "meta":  # a performance model asks for sizes
        return torch.empty(len(names), n, device=device)
    # Drawn on the host: a failed capture would leave an unwritten table here. During capture the copy is refused.
    return philox.normal(key, names, n, torch.device("cpu")).to(device)


def _stack(flat: Tensor, starts: tuple[int, ...], rows: int, columns: int) -> Tensor:
    matrices = [view for _, view in _views(flat, starts, rows, columns)]
    return torch.cat(matrices) if len(matrices) > 1 else matrices[0]


def _multiply_(flat: Tensor, left: Tensor, right: Tensor, starts: tuple[int, ...], subtract: bool = False) -> None:
    """The products of left and right factors, written where the matrices lie, or taken off what lies there."""
    for (i, j), out in _views(flat, starts, left.shape[1], right.shape[1]):
        if subtract:
            out.baddbmm_(left[i:j], right[i:j].mT, alpha=-1)
        elif j == i + 1:
            torch.mm(left[i], right[i].mT, out=out[0])
        else:
            torch.bmm(left[i:j], right[i:j].mT, out=out)


def _views(flat: Tensor, starts: tuple[int, ...], rows: int, columns: int) -> Iterator[tuple[tuple[int, int], Tensor]]:
    """The matrices of one shape where they lie: one view for each stretch of equal distances."""
    for i, j in _runs(starts):
        step = starts[i + 1] - starts[i] if j > i + 1 else rows * columns
        where = flat.storage_offset() + starts[i]
        yield (i, j), flat.as_strided((j - i, rows, columns), (step, columns, 1), where)


@lru_cache(maxsize=1024)
def _runs(starts: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Stretches of equal distances, as in a stack of equal layers: one batched product writes them where they lie."""
    stretches, i = [], 0
    while i < len(starts):
        j = i + 1
        while j < len(starts) and starts[j] - starts[j - 1] == starts[i + 1] - starts[i]:
            j += 1
        stretches.append((i, j))
        i = j
    return tuple(stretches)


@cached_on_device(64)
def _uncompressed(tensors: Segments, rank: int, device: torch.device) -> Tensor:
    """Positions of everything that is not factored."""
    places = [
        torch.arange(a, a + n)
        for shape, a, n in zip(tensors.shapes, tensors.offsets[:-1], tensors.lengths, strict=True)
        if not basis_length(shape, rank)
    ]
    return torch.cat([torch.zeros(0, dtype=torch.int64), *places]).to(device)


def _remember(old: Tensor, shapes: list[ShapeGroup], right: list[Tensor]) -> Tensor:
    basis = torch.empty_like(old)  # all of it is written
    for f, q in zip(shapes, right, strict=True):
        for (i, j), out in _views(basis, f.bases, *q.shape[1:]):
            out.copy_(q[i:j])
    return basis
