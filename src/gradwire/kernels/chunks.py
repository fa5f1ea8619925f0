"""The largest entries of every chunk of consecutive ones; the last chunk of a segment may be short."""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.core.graph_refs import cached_on_device
from gradwire.kernels.dispatch import kernel
from gradwire.kernels.groups import before
from gradwire.kernels.philox import ragged


class Chunks(NamedTuple):
    """Where the chunks of each segment lie. All are int64[segments], on the CPU.

    Attributes:
        start: Where the segment starts.
        length: How many entries it has.
        first: Which chunk is its first.
        out: Where its results start.
        end: Which chunk is the first of the next segment.
        chunks: How many chunks there are in all.
        total: How many results.
    """

    start: Tensor
    length: Tensor
    first: Tensor
    out: Tensor
    end: Tensor
    chunks: int
    total: int


@lru_cache(maxsize=64)
def chunks(lengths: tuple[int, ...], k: int, chunk: int) -> Chunks:
    """Cut segments into chunks that keep ``k`` entries each, or all that they have."""
    length = torch.tensor(lengths, dtype=torch.int64)
    counts = -(-length // chunk)
    held = length // chunk * k + (length % chunk).clamp(max=k)
    end = counts.cumsum(0)
    return Chunks(
        start=before(length),
        length=length,
        first=end - counts,
        out=before(held),
        end=end,
        chunks=int(counts.sum()),
        total=int(held.sum()),
    )


@kernel
def chunk_topk(x: Tensor, lengths: tuple[int, ...], k: int, chunk: int) -> Tensor:
    """Rising flat positions of the ``k`` largest magnitudes of each chunk; of equals the first win."""
    if x.numel() == 0:
        return torch.zeros(0, dtype=torch.int64, device=x.device)
    starts, sizes, held = _rows(lengths, k, chunk, x.device)
    width = min(chunk, max(lengths))
    column = torch.arange(width, device=x.device)
    at = starts[:, None] + column  # [chunks, width]
    # The bits of magnitudes are in the same order. (Those of abs() are not always the same: a GPU has one NaN only.)
    size = x.float().view(torch.int32).long() & 0x7FFFFFFF
    # No two keys are equal: the column decides between equals, and whatever lies outside comes last.
    keys = torch.where(column < sizes[:, None], (size[at.clamp(max=x.numel() - 1)] + 1) << 31, 0) - column
    best = keys.topk(min(k, width), dim=1).indices
    return at.gather(1, best).flatten()[held].sort().values


@cached_on_device(16)
def _rows(lengths: tuple[int, ...], k: int, chunk: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Starts and sizes of all chunks, and which of the best of each are there; cached, so that no step waits."""
    where = chunks(lengths, k, chunk)
    segment = torch.arange(len(lengths)).repeat_interleave(where.end - where.first)
    inside = ragged(where.end - where.first) * chunk
    sizes = (where.length[segment] - inside).clamp(max=chunk)
    best = torch.arange(min(k, chunk, max(lengths)))
    held = (best < sizes[:, None]).flatten().nonzero().flatten()
    return (where.start[segment] + inside).to(device), sizes.to(device), held.to(device)
