"""A selection's plan, its segments' budgets, and the memory that one selection works in.

Kernels read ``table``, int64[segments, 16], by the columns named here, and work in ``state``, of the same shape.
Counters are zero before a selection and are left so by its last kernels: clearing them would be one more launch.
"""

import itertools
import threading
from collections import defaultdict
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.core.graph_refs import pin
from gradwire.kernels.cuda.tables import BLOCK, Grid, grid
from gradwire.kernels.groups import before

COLUMNS = tl.constexpr(16)

# Columns of the table.
START = tl.constexpr(0)  # of the segment, in the buffer
LENGTH = tl.constexpr(1)
COUNT = tl.constexpr(2)  # how many to select
ROOM = tl.constexpr(3)  # how many candidates may be kept
SLOT = tl.constexpr(4)  # where its candidates start
OUT = tl.constexpr(5)  # where its results start
ROW = tl.constexpr(6)
ROW_END = tl.constexpr(7)
CHUNK = tl.constexpr(8)
CHUNKS = tl.constexpr(9)
KIND = tl.constexpr(10)  # one of the three below

SMALL = tl.constexpr(0)  # every entry is a candidate
SPARSE = tl.constexpr(1)  # few are selected: whatever reaches the lower end of the range is a candidate
DENSE = tl.constexpr(2)  # many are selected: what lies above the range wins and is not kept

# Columns of the state.
LOW = tl.constexpr(0)  # candidates have at least this key,
HIGH = tl.constexpr(1)  # and a smaller one than this
BITS = tl.constexpr(2)  # of a key below its fine bin
ARRIVED = tl.constexpr(3)  # counter: programs of the segment that are done, in one launch
FOUND = tl.constexpr(4)  # counter: candidates
OVER = tl.constexpr(5)  # counter: entries above the range
BOUND = tl.constexpr(6)  # counter: candidates in the bin that holds the last winner
CUT = tl.constexpr(7)  # that bin
ABOVE = tl.constexpr(8)  # how many candidates lie above it
WITHIN = tl.constexpr(9)  # and how many in it
OUTCOME = tl.constexpr(10)  # one of the four below
KEY = tl.constexpr(11)  # winners have a larger key than this,
LAST = tl.constexpr(12)  # or the same and a place no later than this. In `radix`: how many win of those that agree
LARGER = tl.constexpr(13)  # counter: entries above a guessed key
TIED = tl.constexpr(14)  # counter: entries that tie with it
TOP = tl.constexpr(15)  # the bin of all keys from there on

EXACT = tl.constexpr(0)  # the last winner is a candidate
MISSED = tl.constexpr(1)  # candidates were too few or too many
ZEROS = tl.constexpr(2)  # too few, but there are no others: zeros win, too
PROVEN = tl.constexpr(3)  # candidates were of no use, but a guess of the last winner was right

BINS = tl.constexpr(1024)  # of a sample
FEW_BINS = tl.constexpr(128)  # of candidates: a warp counts these in a fifth of the time that 1024 take,
FINE_BINS = tl.constexpr(1024)  # and of those in one of these bins
APART = tl.constexpr(8)  # words from one fine bin to the next: many programs count there, and neighbors would wait
DIGIT_BINS = tl.constexpr(128)  # the most values of a digit; see `radix`
SLAB = tl.constexpr(512)  # entries of a program of `mark`
PARTS = tl.constexpr(BLOCK // SLAB.value)  # slabs of a tile
ROWS = tl.constexpr(32)  # in a chunk, the work of one program after the first pass
SAMPLED = tl.constexpr(64)  # chunks of a segment, at least, that are sampled if there are so many
SHORT_RUN, LONG_RUN = 16, 64  # neighbors that are sampled together; a chunk has a run for each row

_serial = itertools.count()
_recent: dict[Any, tuple[Any, Any, "SelectionPlan"]] = {}  # by identity: hashing hundreds of numbers is slow
_PLANS = 256  # that are kept
_SMALL = 2048  # entries of a small segment
_MANY = 16  # of so many entries one or more: the segment is dense
_SEVERAL = 256  # of so many entries one or more, and
_ENOUGH = 16  # of those that are selected in a short sample: then it suffices


class Scratch(NamedTuple):
    """Memory of a selection in flight. Candidates are (bits, place) pairs; see `compact`."""

    serial: int  # no other scratch has the same
    state: Tensor  # int64[segments, 16]
    fine: Tensor  # int32[segments, FINE_BINS, APART], of candidates
    coarse: Tensor  # int32[segments, BINS], of a sample
    digits: Tensor  # int64[segments, DIGIT_BINS], of everything
    words: Tensor  # int32[rows, PARTS], how many candidates there are; see `mark`
    slot_bits: Tensor  # int32[rows, PARTS, slots], candidates as `mark` finds them,
    slot_at: Tensor  # int16, likewise, and where in the slab
    base: Tensor  # int64[chunks], where a chunk's candidates start
    number: Tensor  # int32[chunks], how many there are
    kept: Tensor  # int32[room], the bits of values; those of magnitudes order alike
    place: Tensor  # int32 or int64[room], in the segment
    bound_key: Tensor
    bound_place: Tensor
    sure: Tensor  # int32[chunks], winners in the chunk; or how many tie there
    out: Tensor  # int64[chunks], where winners go
    flags: Tensor  # uint8[2]: some gradient entry was not finite; some segment needs `radix`


class SelectionPlan(NamedTuple):
    """What to select from where. Kernels only read the tensors, which are on the device."""

    serial: int  # no other plan has the same
    grid: Grid
    total: int  # results
    chunks: int
    room: int  # for candidates
    slots: int  # for those of a slab
    dense: bool  # some segment is dense
    run: int  # the length of a sample's runs
    place: torch.dtype
    table: Tensor
    chunk_segment: Tensor  # int32[chunks]
    sampled: Tensor  # int32, the chunks that are sampled
    pool: "Pool"


def plan(lengths: tuple[int, ...], counts: tuple[int, ...], device: torch.device) -> SelectionPlan:
    """The plan of these lengths and budgets; a budget may exceed its length."""
    key = (id(lengths), id(counts), device)
    entry = _recent.get(key)
    if entry is None or entry[0] is not lengths or entry[1] is not counts:
        if len(_recent) >= _PLANS:
            _recent.clear()
        entry = _recent[key] = (lengths, counts, _made(lengths, counts, device))
    return pin(entry[2])


@lru_cache(maxsize=_PLANS)
def _made(lengths: tuple[int, ...], counts: tuple[int, ...], device: torch.device) -> SelectionPlan:
    return _plan(lengths, counts, device)


def _plan(lengths: tuple[int, ...], counts: tuple[int, ...], device: torch.device) -> SelectionPlan:
    tiles = grid(lengths, device)
    size = torch.tensor(lengths, dtype=torch.int64)
    count = torch.minimum(torch.tensor(counts, dtype=torch.int64), size)
    dense = (_MANY * count > size) & (size > _SMALL)
    kind = torch.where(size <= _SMALL, SMALL.value, torch.where(dense, DENSE.value, SPARSE.value))
    room = torch.where(dense, size // 32 + (32 * size.sqrt()).long(), 6 * count) + 1024
    room = torch.where(size <= _SMALL, size, torch.minimum(size, room)) * (count > 0)
    row = tiles.segment_row.cpu()
    chunks = torch.where(count > 0, (row.diff() + ROWS.value - 1) // ROWS.value, 0)
    budgets = before(size), size, count, room, before(room), before(count)
    columns = (*budgets, row[:-1], row[1:], before(chunks), chunks, kind)
    table = torch.zeros(len(lengths), COLUMNS.value, dtype=torch.int64)
    table[:, : len(columns)] = torch.stack(columns, 1)
    runs = torch.minimum(chunks, torch.tensor(SAMPLED.value)) * ROWS.value
    many = (_SEVERAL * count > size) & (count * runs * SHORT_RUN >= _ENOUGH * size)
    short = bool((many & ~dense | (kind == SMALL.value) | (count == 0)).all())
    run = SHORT_RUN if short else LONG_RUN
    taken = runs * run
    segment = torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(chunks)
    mine = torch.arange(segment.numel(), dtype=torch.int32) - before(chunks)[segment]
    return SelectionPlan(
        next(_serial),
        tiles,
        int(count.sum()),
        segment.numel(),
        int(room.sum()),
        _slots(count, size, dense, taken, kind == SMALL.value),
        bool(dense.any()),
        run,
        torch.int32 if max(lengths, default=0) < 2**31 else torch.int64,
        table.to(device),
        segment.to(device),
        (mine % (chunks // SAMPLED.value + 1)[segment] == 0).nonzero().flatten().int().to(device),
        Pool(),
    )


def _slots(count: Tensor, size: Tensor, dense: Tensor, taken: Tensor, small: Tensor) -> int:
    """Twice as many slots as a slab has candidates, and a few more: most slabs need no others. See `sample`."""
    share = count / size.clamp(min=1)
    doubt = 4 * (share * (1 - share) / taken.clamp(min=1)).sqrt() + 1 / 256
    expected = torch.where(dense, 2 * doubt, 1.5 * share) * size * ~small
    mean = SLAB.value * float(expected.sum()) / max(int(size[~small].sum()), 1)
    return int(min(max(triton.next_power_of_2(int(2 * mean + 6)), 8), 128))


class Pool:
    """Scratch that no selection is using. A stream's own comes back to it, since its kernels run in order."""

    def __init__(self) -> None:
        self._free: defaultdict[int, list[Scratch]] = defaultdict(list)
        self._lock = threading.Lock()

    def take(self, plan: SelectionPlan, stream: int | None) -> Scratch:
        """Clean scratch: used before on this stream, or new."""
        if stream is not None:
            with self._lock:
                if free := self._free[stream]:
                    return free.pop()
        return _scratch(plan)

    def give(self, scratch: Scratch, stream: int | None) -> None:
        """Take it back, all kernels of its selection being launched."""
        if stream is not None:
            with self._lock:
                self._free[stream].append(scratch)


def stream_of(device: torch.device) -> int | None:
    """A name for the current stream; None while a graph is being captured, which must own what it uses."""
    if device.type != "cuda":
        return 0
    return None if torch.cuda.is_current_stream_capturing() else torch._C._cuda_getCurrentRawStream(device.index)


def _scratch(plan: SelectionPlan) -> Scratch:
    device, segments = plan.table.device, plan.table.shape[0]
    words = plan.grid.rows * PARTS.value

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    def empty(n: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(n, dtype=dtype, device=device)

    return Scratch(
        next(_serial),
        zeros(segments, COLUMNS.value, dtype=torch.int64),
        zeros(segments, FINE_BINS.value, APART.value),
        zeros(segments, BINS.value),
        zeros(segments, DIGIT_BINS.value, dtype=torch.int64),
        empty(words),
        empty(words * plan.slots),
        empty(words * plan.slots, torch.int16),
        empty(plan.chunks, torch.int64),
        empty(plan.chunks),
        empty(plan.room),
        empty(plan.room, plan.place),
        empty(plan.room),
        empty(plan.room, plan.place),
        empty(plan.chunks),
        empty(plan.chunks, torch.int64),
        zeros(2, dtype=torch.uint8),
    )


assert BLOCK % SLAB.value == 0
