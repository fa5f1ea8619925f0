"""A selection plan: its segments' budgets, and the memory that one selection works in.

Kernels read ``table``, int64[segments, 16], by the columns named here, and work in ``state``, of the same shape. All
scratch is zero before a selection and is left so by its last kernel: clearing it would be one more launch.
"""

import itertools
import threading
from collections import defaultdict
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from gradwire.core.graph_refs import keep
from gradwire.kernels.cuda.tables import BLOCK, Grid, grid

COLUMNS = tl.constexpr(16)
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

FOUND = tl.constexpr(0)  # candidates above the hint
BOUND = tl.constexpr(1)  # of those, the ones in the bin that holds the last winner
MET = tl.constexpr(2)  # programs that have arrived, in one launch
LEFT = tl.constexpr(3)  # and in the next
AGAIN = tl.constexpr(4)  # candidates of a second try
BAR = tl.constexpr(5)  # the key they had to reach
MISSED = tl.constexpr(6)  # 0 if the hint was of use, or one of those below
KEY = tl.constexpr(7)  # winners have a larger key than this,
LAST = tl.constexpr(8)  # or the same and a place no later than this
CAME = tl.constexpr(9)  # programs that have put their candidates aside
CUT = tl.constexpr(10)  # the fine bin that holds the last winner
ABOVE = tl.constexpr(11)  # how many candidates lie above that bin
WITHIN = tl.constexpr(12)  # and how many in it
ALIKE = tl.constexpr(13)  # entries that agree with the key so far; see `radix`
STEP = tl.constexpr(14)  # bits of a key below its step; see `bracket`

LOST = tl.constexpr(1)  # candidates were too few or too many
ZEROS = tl.constexpr(2)  # too few, but there are no others: zeros win, too
NEAR = tl.constexpr(3)  # there are none, but a range that holds the last winner

BINS = tl.constexpr(1024)
APART = tl.constexpr(8)  # words from one fine bin to the next: many programs count there, and neighbors would wait
SPAN = tl.constexpr(64)  # entries that the sweep describes in one word
ROWS = tl.constexpr(32)  # in a chunk, the work of one program after the sweep

_serial = itertools.count()
_recent: dict[tuple[int, int, torch.device, int], tuple[Any, Any, "Plan"]] = {}  # hashing hundreds of numbers is slow
_made: dict[tuple[Any, ...], dict[int, "Plan"]] = {}  # by lengths, counts and device, the oldest first; then by stream
_PLANS = 256  # that are kept
_SMALL = 2048  # segments up to this are candidates as a whole
_MANY = 6  # of so many entries one or more: room for candidates would be room for all


class Scratch(NamedTuple):
    """Memory of a selection in flight. Candidates are (key, place) pairs; see `collect`."""

    serial: int  # no other scratch has the same
    state: Tensor  # int64[segments, 16]
    fine: Tensor  # int32[segments, BINS, APART], of candidates
    coarse: Tensor  # int32[segments, BINS], of everything
    words: Tensor  # int32[rows, BLOCK / SPAN], where candidates are; see `sweep`
    base: Tensor  # int64[chunks], where a chunk's candidates start
    number: Tensor  # int32[chunks], how many there are
    key: Tensor  # int32[slots], magnitudes as bits, which order alike
    place: Tensor  # int32 or int64[slots], in the segment
    bound_key: Tensor
    bound_place: Tensor
    sure: Tensor  # int32[chunks], winners in the chunk
    out: Tensor  # int64[chunks], where they go
    broken: Tensor  # uint8[1]


class Plan(NamedTuple):
    """What to select from where. Of the tensors, all on the device, kernels change ``slack`` alone."""

    serial: int  # no other plan has the same
    grid: Grid
    total: int  # results
    chunks: int
    deepest: int  # chunks of one segment
    slots: int
    silent: bool  # some segment has entries, but none of them is wanted
    dense: bool  # so many are wanted that candidates are not worth being put aside; see `radix`
    place: torch.dtype
    table: Tensor
    slack: Tensor  # float32[segments]: candidates reach this part of the hint; 0: all are. `narrow` learns it
    whole: Tensor  # float32[segments]: 0 where all are candidates, else 1
    chunk_segment: Tensor  # int32[chunks]
    pool: "Pool"


def plan(lengths: tuple[int, ...], counts: tuple[int, ...], device: torch.device) -> Plan:
    """The plan of these lengths and budgets, for this stream; a budget may exceed its length.

    Streams do not share one: the bar, of which ``slack`` is a part, must not change while a selection is under way.
    """
    key = (id(lengths), id(counts), device, _current(device))
    found = _recent.get(key)
    if found is None or found[0] is not lengths or found[1] is not counts:
        if len(_recent) >= _PLANS:
            _recent.clear()
        found = _recent[key] = (lengths, counts, _of_stream(key[3], lengths, counts, device))
    return keep(found[2])


def _of_stream(stream: int, *what: Any) -> Plan:
    """Its plan. Where a graph is captured no table can be made, and one of another stream must do."""
    mine = _made.setdefault(what, {})
    if stream not in mine:
        if mine and _captures(what[2]):
            return next(iter(mine.values()))
        if len(_made) > _PLANS:
            _made.pop(next(iter(tuple(_made))), None)
        mine[stream] = _plan(*what)
    return mine[stream]


def _plan(lengths: tuple[int, ...], counts: tuple[int, ...], device: torch.device) -> Plan:
    tiles = grid(lengths, device)
    size = torch.tensor(lengths, dtype=torch.int64)
    count = torch.minimum(torch.tensor(counts, dtype=torch.int64), size)
    dense = bool(_MANY * count.sum() > size.sum()) and max(lengths, default=0) < 2**31  # digits are counted in int32
    room = torch.where(count > 0, torch.minimum(size, 6 * count + 1024), 0)
    whole = (size <= _SMALL) | (count == size)
    room = torch.where(whole & (count > 0), size, room) * (not dense)
    # A first guess. The fewer are selected, the more the last one's magnitude moves from step to step.
    slack = torch.where(whole, 0.0, 0.9 * (1 + 4 / count.clamp(min=1).sqrt()) ** -0.25)
    row = tiles.segment_row.cpu()
    chunks = torch.where(count > 0, (row.diff() + ROWS.value - 1) // ROWS.value, 0)
    columns = [
        _before(size),
        size,
        count,
        room,
        _before(room),
        _before(count),
        row[:-1],
        row[1:],
        _before(chunks),
        chunks,
    ]
    table = torch.zeros(len(lengths), COLUMNS.value, dtype=torch.int64)
    table[:, : len(columns)] = torch.stack(columns, 1)
    segment = torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(chunks)
    return Plan(
        next(_serial),
        tiles,
        int(count.sum()),
        segment.numel(),
        int(chunks.max()) if len(lengths) else 0,
        int(room.sum()),
        bool(((size > 0) & (count == 0)).any()),
        dense,
        torch.int32 if max(lengths, default=0) < 2**31 else torch.int64,
        table.to(device),
        slack.float().to(device),
        slack.sign().float().to(device),
        segment.to(device),
        Pool(),
    )


class Pool:
    """Scratch that no selection is using. A stream's own comes back to it, since its kernels run in order."""

    def __init__(self) -> None:
        self._free: defaultdict[int, list[Scratch]] = defaultdict(list)
        self._lock = threading.Lock()

    def take(self, plan: Plan, stream: int | None) -> Scratch:
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
    return None if _captures(device) else _current(device)


def _captures(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _current(device: torch.device) -> int:
    return int(torch._C._cuda_getCurrentRawStream(device.index)) if device.type == "cuda" else 0


def _scratch(plan: Plan) -> Scratch:
    device, segments = plan.table.device, plan.table.shape[0]

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    def empty(n: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(n, dtype=dtype, device=device)

    state = zeros(segments, COLUMNS.value, dtype=torch.int64)
    if plan.dense:  # then digits have to find the last winner
        state[:, MISSED.value] = LOST.value
    return Scratch(
        next(_serial),
        state,
        zeros(segments, BINS.value, APART.value),
        zeros(segments, BINS.value),
        empty(plan.grid.rows * (BLOCK // SPAN.value)),
        empty(plan.chunks, torch.int64),
        empty(plan.chunks),
        empty(plan.slots),
        empty(plan.slots, plan.place),
        empty(plan.slots),
        empty(plan.slots, plan.place),
        empty(plan.chunks),
        empty(plan.chunks, torch.int64),
        zeros(1, dtype=torch.uint8),
    )


def _before(x: Tensor) -> Tensor:
    return x.cumsum(0) - x


assert BLOCK % SPAN.value == 0
