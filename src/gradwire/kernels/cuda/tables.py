"""Where segments lie in the tiles of a launch, worked out once per plan and kept on the device.

A *tile* is `BLOCK` consecutive elements of the flat buffer, the work of one program. A *row* is what one tile and one
segment have in common; the rows of a segment are consecutive. Nearly all tiles hold one row.
"""

from collections.abc import Callable
from functools import wraps
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from gradwire.core.graph_refs import cached_on_device
from gradwire.core.layout import Scattered

P = ParamSpec("P")
R = TypeVar("R")

BLOCK = 2048
WIDE = (torch.float32, torch.bfloat16, torch.float16)  # what kernels read, widening it to float32


class Grid(NamedTuple):
    """Tiles, rows and segments of a flat buffer.

    Attributes:
        n: How many elements there are.
        tiles: How many tiles.
        rows: How many rows.
        longest: How many of them the segment with the most has.
        tile_row: int32[tiles + 1], the first row of each tile.
        tile_segment: int32[tiles], whose that row is.
        row_segment: int32[rows].
        starts: int64[segments + 1], where segments start, and where the last one ends.
        segment_row: int64[segments + 1], the first row of each segment.
        fours: Whether all segments start at multiples of four.
        eights: Of eight, likewise.
        widest: The length of the longest segment.
    """

    n: int
    tiles: int
    rows: int
    longest: int
    tile_row: Tensor
    tile_segment: Tensor
    row_segment: Tensor
    starts: Tensor
    segment_row: Tensor
    fours: bool
    eights: bool
    widest: int

    @property
    def tables(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What a kernel reads that asks in which segments a tile lies."""
        return self.tile_row, self.tile_segment, self.row_segment, self.starts


@cached_on_device(1024)  # buckets of many layers, and each rank's slice of them
def grid(lengths: tuple[int, ...], device: torch.device) -> Grid:
    """The tiles of segments of these lengths."""
    size = torch.tensor(lengths, dtype=torch.int64)
    ends = size.cumsum(0)
    starts, n = ends - size, int(size.sum())
    first = starts // BLOCK
    counts = torch.where(size > 0, (ends - 1) // BLOCK - first + 1, 0)
    row_segment = torch.arange(len(lengths)).repeat_interleave(counts)
    segment_row = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
    row_tile = first[row_segment] + torch.arange(row_segment.numel()) - segment_row[row_segment]
    tiles = -(-n // BLOCK)
    tile_row = torch.searchsorted(row_tile, torch.arange(tiles + 1))
    return Grid(
        n,
        tiles,
        row_segment.numel(),
        max(counts.tolist(), default=0),
        tile_row.int().to(device),
        row_segment[tile_row[:-1]].int().to(device),
        row_segment.int().to(device),
        torch.cat((starts, torch.tensor([n]))).to(device),
        segment_row.to(device),
        not bool((starts[size > 0] % 4).any()),
        not bool((starts[size > 0] % 8).any()),
        max(lengths, default=0),
    )


def placed(function: Callable[P, R]) -> Callable[P, R]:
    """Launch on the device of the first argument, whichever is the current one."""

    @wraps(function)
    def on_device(*args: P.args, **named: P.kwargs) -> R:
        first = args[0]
        assert isinstance(first, Tensor | Scattered)
        device = first.device
        if device.type != "cuda" or device.index == torch.cuda.current_device():
            return function(*args, **named)
        with torch.cuda.device(device):
            return function(*args, **named)

    return on_device


def definition(dispatched: Callable[P, R]) -> Callable[P, R]:
    """The plain torch version behind a dispatched kernel, for what no kernel here can do."""
    plain: Callable[P, R] = dispatched.__wrapped__  # type: ignore[attr-defined]
    return plain
