"""AdamW's step over frozen denominators: one launch for all parameters, found by a table of their addresses."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.core.graph_refs import cached_on_device
from gradwire.kernels import apply_momentum
from gradwire.kernels.apply_momentum import Applied
from gradwire.kernels.cuda.accumulate import fetch, put
from gradwire.kernels.cuda.places import moved
from gradwire.kernels.cuda.tables import definition, placed
from gradwire.kernels.philox import ragged

_TILE = 2048
_COLUMNS = tl.constexpr(4)  # addresses of parameter, momentum and denominator, and their length


@triton.jit
def _at(column, start, ALIGNED: tl.constexpr):
    pointer = tl.load(column).to(tl.pointer_type(tl.float32))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer + start


@triton.jit
def _tile(p, x, d, left, shrink, size, MASKED: tl.constexpr, TILE: tl.constexpr):
    at = tl.arange(0, TILE)
    live = at < left
    # All is asked for before anything is divided: a division has branches, which no load is moved across.
    now, step = fetch(p, at, live, MASKED), fetch(x, at, live, MASKED)
    divisor = tl.load(d + at, mask=live, other=1.0) if MASKED else tl.load(d + at)
    put(p, at, shrink * now + size * tl.div_rn(step, divisor), live, MASKED)


@triton.jit
def _apply(rows, tensors, starts, shrink, size, ALIGNED: tl.constexpr, TILE: tl.constexpr):
    tile = tl.program_id(0)
    row, start = rows + tl.load(tensors + tile) * _COLUMNS, tl.load(starts + tile)
    start = tl.multiple_of(start, TILE)
    p, x, d = _at(row, start, ALIGNED), _at(row + 1, start, ALIGNED), _at(row + 2, start, ALIGNED)
    left = tl.load(row + 3) - start
    if left >= TILE:
        _tile(p, x, d, left, shrink, size, False, TILE)
    else:
        _tile(p, x, d, left, shrink, size, True, TILE)


@cached_on_device(256)
def _addresses(rows: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """Where tensors lie, int64[tensors, columns]; it may be elsewhere at every step."""
    return moved(torch.tensor(rows), device)


@cached_on_device(256)
def _tiles(lengths: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Whose each tile is, int32[tiles], and where in it the tile starts, int64[tiles]."""
    counts = -(-torch.tensor(lengths) // _TILE)
    owner = torch.arange(len(lengths)).repeat_interleave(counts)
    return moved(owner.int(), device), moved(ragged(counts) * _TILE, device)


@placed
def apply_momentum_(first: Tensor, parts: Applied, shrink: float, size: float) -> None:
    everything = [x for part in parts for x in part]
    if not all(x.dtype == torch.float32 and x.is_contiguous() and x.device == first.device for x in everything):
        definition(apply_momentum.apply_momentum_)(first, parts, shrink, size)
        return
    rows = tuple([(*[x.data_ptr() for x in row], row[0].numel()) for row in zip(*parts, strict=True)])
    owner, start = _tiles(tuple([row[-1] for row in rows]), first.device)
    if start.numel():
        aligned = all(address % 16 == 0 for row in rows for address in row[:3])
        _apply[(start.numel(),)](
            _addresses(rows, first.device), owner, start, shrink, size, aligned, _TILE,
            num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
