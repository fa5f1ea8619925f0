"""A selection plan: its segments' budgets, and the memory that one selection works in.

Kernels read ``table``, int64[segments, 16], by the columns named here, and work in ``state``, of the same shape. All
scratch is zero before a selection and is left so by its last kernel: clearing it would be one more launch.
"""

import threading
from collections import defaultdict
from functools import lru_cache
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

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
MISSED = tl.constexpr(6)  # whether the hint was of no use
KEY = tl.constexpr(7)  # winners have a larger key than this,
LAST = tl.constexpr(8)  # or the same and a place no later than this

BINS = tl.constexpr(1024)
ROWS = tl.constexpr(64)  # in a chunk, the work of one program after the sweep

_SMALL = 2048  # segments up to this are candidates as a whole


class Scratch(NamedTuple):
    """Memory of a selection in flight. Candidates are (key, place) pairs; see `sweep`."""

    state: Tensor  # int64[segments, 16]
    hist: Tensor  # int32[segments, 2, BINS]: candidates, and everything
    row_base: Tensor  # int64[rows], where a row's candidates start
    row_count: Tensor  # int32[rows]
    key: Tensor  # int32[slots], magnitudes as bits, which order alike
    place: Tensor  # int32 or int64[slots], in the segment
    bound_key: Tensor
    bound_place: Tensor
    sure: Tensor  # int32[chunks], winners in the chunk
    out: Tensor  # int64[chunks], where they go
    broken: Tensor  # uint8[1]


class Plan(NamedTuple):
    """What to select from where. Of the tensors, all on the device, kernels change ``slack`` alone."""

    grid: Grid
    total: int  # results
    chunks: int
    deepest: int  # chunks of one segment
    slots: int
    place: torch.dtype
    table: Tensor
    slack: Tensor  # float32[segments]: candidates reach this part of the hint; 0: all are. `narrow` learns it
    whole: Tensor  # float32[segments]: 0 where all are candidates, else 1
    chunk_segment: Tensor  # int32[chunks]
    pool: "Pool"


@lru_cache(maxsize=64)
def plan(lengths: tuple[int, ...], counts: tuple[int, ...], device: torch.device) -> Plan:
    """The plan of these lengths and budgets; a budget may exceed its length."""
    tiles = grid(lengths, device)
    size = torch.tensor(lengths, dtype=torch.int64)
    count = torch.minimum(torch.tensor(counts, dtype=torch.int64), size)
    room = torch.where(count > 0, torch.minimum(size, 6 * count + 1024), 0)
    whole = (size <= _SMALL) | (count == size)
    room = torch.where(whole & (count > 0), size, room)
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
        tiles,
        int(count.sum()),
        segment.numel(),
        int(chunks.max()) if len(lengths) else 0,
        int(room.sum()),
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

    def take(self, plan: Plan) -> Scratch:
        """Clean scratch: used before on this stream, or new."""
        stream = _stream(plan.table.device)
        if stream is not None:
            with self._lock:
                if free := self._free[stream]:
                    return free.pop()
        return _scratch(plan)

    def give(self, scratch: Scratch) -> None:
        """Take it back, all kernels of its selection being launched."""
        stream = _stream(scratch.state.device)
        if stream is not None:
            with self._lock:
                self._free[stream].append(scratch)


def _stream(device: torch.device) -> int | None:
    """A name for the current stream; None while a graph is being captured, which must own what it uses."""
    if device.type != "cuda":
        return 0
    return None if torch.cuda.is_current_stream_capturing() else torch.cuda.current_stream(device).cuda_stream


def _scratch(plan: Plan) -> Scratch:
    device, segments = plan.table.device, plan.table.shape[0]

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    def empty(n: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(n, dtype=dtype, device=device)

    return Scratch(
        zeros(segments, COLUMNS.value, dtype=torch.int64),
        zeros(segments, 2, BINS.value),
        empty(plan.grid.rows, torch.int64),
        empty(plan.grid.rows),
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


assert BLOCK <= 2**15  # a row's candidates are counted in int32
