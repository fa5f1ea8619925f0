"""The largest entries of every chunk: a program holds a chunk, and halves the range of its last winner's magnitude."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.core.keepsakes import kept
from gradwire.kernels import chunks as plain
from gradwire.kernels.cuda.enter import readable
from gradwire.kernels.cuda.launch import form, launch
from gradwire.kernels.cuda.sweep import key_of
from gradwire.kernels.cuda.tables import definition, placed

_WIDEST = 16384  # a larger chunk does not fit into one program
_COLUMNS = tl.constexpr(5)  # of the table: start, length, first chunk, first result, and the chunk after the last


@triton.jit
def _owner(table, segments, chunk):
    """The first segment that ends beyond a chunk."""
    low = chunk * 0
    high = low + segments - 1
    while low < high:
        middle = (low + high) // 2
        if tl.load(table + middle * _COLUMNS + 4) > chunk:
            high = middle
        else:
            low = middle + 1
    return low


@triton.jit
def _edge(key, wanted):
    """The largest key that so many reach."""
    high = tl.max(key, 0)
    low = high * 0
    while low < high:
        middle = high - (high - low) // 2
        if tl.sum((key >= middle).to(tl.int32), 0) >= wanted:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def _choose(x, out, table, segments, k, CHUNK: tl.constexpr, WIDTH: tl.constexpr):
    chunk = tl.program_id(0).to(tl.int64)
    row = table + _owner(table, segments, chunk) * _COLUMNS
    i = chunk - tl.load(row + 2)
    begin = tl.load(row) + i * CHUNK
    size = tl.minimum(tl.load(row + 1) - i * CHUNK, CHUNK).to(tl.int32)
    wanted = tl.minimum(size, k)
    at = tl.arange(0, WIDTH)
    live = at < size
    key = tl.where(live, key_of(tl.load(x + begin + at, mask=live, other=0.0).to(tl.float32)), -1)
    edge = _edge(key, wanted)
    tie = (key == edge).to(tl.int32)
    left = wanted - tl.sum((key > edge).to(tl.int32), 0)
    won = (key > edge) | ((tie != 0) & (tl.cumsum(tie, 0) <= left))
    to = tl.load(row + 3) + i * k + tl.cumsum(won.to(tl.int32), 0) - 1
    tl.store(out + to, begin + at, mask=won)


@kept(64)
def _table(lengths: tuple[int, ...], k: int, chunk: int, device: torch.device) -> Tensor:
    return torch.stack(plain.chunks(lengths, k, chunk)[:5], 1).contiguous().to(device)


@placed
def chunk_topk(x: Tensor, lengths: tuple[int, ...], k: int, chunk: int) -> Tensor:
    where = plain.chunks(lengths, k, chunk)
    if not where.chunks or chunk > _WIDEST or not readable(x):
        return definition(plain.chunk_topk)(x, lengths, k, chunk)
    out = torch.empty(where.total, dtype=torch.int64, device=x.device)
    width = triton.next_power_of_2(chunk)
    fresh = (x, out, _table(lengths, k, chunk, x.device))
    rest = (len(lengths), k, chunk, width)
    launch(_choose, where.chunks, (*rest, *form(*fresh)), fresh, rest, num_warps=max(1, min(16, width // 256)))
    return out
