"""Ragged groups: one number per group of consecutive values, computed without a loop over groups.

A *group* is what shares one scale: a segment, or a block of a segment.
"""

from functools import lru_cache

import torch
from torch import Tensor

from gradwire.core.graph_refs import cached_on_device
from gradwire.core.segments import known


def blocks(lengths: Tensor, block: int | None) -> Tensor:
    """Cut each segment into blocks of at most ``block`` values; None keeps segments whole. -> int64[groups]."""
    if block is None:
        return lengths
    counts = (lengths + block - 1) // block
    sizes = torch.full((int(counts.sum()),), block, dtype=torch.int64, device=lengths.device)
    used = counts > 0
    last = counts.cumsum(0)[used] - 1
    sizes[last] = lengths[used] - (counts[used] - 1) * block
    return sizes


@lru_cache(maxsize=64)
def block_lengths(lengths: tuple[int, ...], block: int | None) -> tuple[int, ...]:
    """`blocks` of lengths that the host knows."""
    if block is None:
        return lengths
    return tuple(min(block, n - start) for n in lengths for start in range(0, n, block))


def blocks_of(lengths: Tensor, block: int | None) -> Tensor:
    """The lengths of the blocks of all segments, to pass to `largest` and `spread`: a scale for each block.

    A block has ``block`` values, the last of a segment fewer, and None keeps segments whole. It is `blocks`, kept: a
    GPU that was read once for a table of lengths is not read again.
    """
    if block is None or lengths.device.type == "cpu":
        return blocks(lengths, block)
    return block_sizes(known(lengths), block, lengths.device)


@cached_on_device(256)
def block_sizes(lengths: tuple[int, ...], block: int | None, device: torch.device) -> Tensor:
    """`blocks` on a device. A table may have a number for every few values, and is found by its few arguments."""
    return blocks(torch.tensor(lengths, dtype=torch.int64), block).to(device)


def num_blocks(lengths: tuple[int, ...], block: int | None) -> int:
    """How many blocks `blocks_of` makes of segments of these lengths: how many scales ``size`` must count."""
    return len(lengths) if block is None else sum(-(-n // block) for n in lengths)


def spread(numbers: Tensor, groups: Tensor, total: int | None = None) -> Tensor:
    """Each group's number, once for each of its values; with their ``total`` the host need not wait for the device."""
    return numbers.repeat_interleave(groups, output_size=total)


def before(counts: Tensor) -> Tensor:
    """How many all groups before each one have together: where it begins."""
    return counts.cumsum(0) - counts


def over(x: Tensor, count: int) -> Tensor:
    """``x / count``, rounded once: on a GPU, torch would multiply by the reciprocal of a Python number."""
    return x / count if x.device.type == "cpu" else x / torch.full((), count, dtype=x.dtype, device=x.device)


def over_(x: Tensor, count: int) -> Tensor:
    """`over`, in place: of what is long, new memory costs more than the division."""
    if count == 1:
        return x
    return x.div_(count) if x.device.type == "cpu" else x.div_(torch.full((), count, dtype=x.dtype, device=x.device))


def over_senders(x: Tensor, places: Tensor) -> Tensor:
    """Each sum over how many messages had an entry there; ``places`` are the positions of all of them."""
    ones = torch.ones((), dtype=torch.int32, device=x.device).expand(places.numel())
    senders = torch.zeros(x.numel(), dtype=torch.int32, device=x.device).index_add_(0, places, ones)
    return x.div_(senders.clamp_(min=1))


def total(x: Tensor, groups: Tensor) -> Tensor:
    """Each group's sum, in float64: the order of addition must not show in a float32 scale."""
    return torch.segment_reduce(x.double(), "sum", lengths=groups, unsafe=True, initial=0.0)


def mean(x: Tensor, groups: Tensor) -> Tensor:
    """Each group's mean as float32; 0 for an empty group."""
    return (total(x, groups) / groups.clamp(min=1)).float()


def largest(x: Tensor, groups: Tensor) -> Tensor:
    """Each group's maximum; 0 for an empty group. For magnitudes."""
    return torch.segment_reduce(x, "max", lengths=groups, unsafe=True, initial=0.0)
