"""Codes of positions row by row: how many each row has, then gaps under the parameter which that number suggests.

The byte format, for ``count`` positions in rows whose widths both sides know. Bit i of a part is bit i mod 8 of byte i
div 8. A row with c positions among w has the parameter b = floor(log2((w - c) / (c + 1))), at least 0: the mean of its
gaps, up to a factor of two. A gap g is q = g >> b and r = g & (2**b - 1); the first of a row counts from its beginning.

    named       how many rows are named, in 4 little-endian bytes: all, or those that have positions
    empty       how many rows are passed over before each that is named, unless all are; blocks of `kernels.rice`
    counts      how many positions each named row has, less one unless all are named; likewise
    quotients   q zeros and a one for each gap, without a pause; zeros fill the last byte
    remainders  r in b bits, least significant first, without a pause; zeros fill the last byte

Of the two ways to say the counts, the sender takes the shorter one. No positions take no bytes. A parameter costs
nothing, since the counts say it; and they are most of what there is to know about the gradient of a weight: what one
output learns, another does not.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.core.graph_refs import cached_on_device
from gradwire.core.payload import CorruptMessageError, as_bytes
from gradwire.kernels import rice
from gradwire.kernels.dispatch import kernel

_NUMBER = 4  # bytes

Runs = tuple[tuple[int, int], ...]  # how many rows, of which width, one run after the other


class RowTable(NamedTuple):
    """Where each row begins and how wide it is, int64[rows]."""

    starts: Tensor
    widths: Tensor


@lru_cache(maxsize=256)
def joined(runs: Runs, count: int) -> Runs:
    """Narrow rows taken together, until there are some thirty for a position at most; what is left of a run is one.

    Rows with nothing in them cost next to nothing where they lie together, so joining is only to keep them countable.
    """
    total = sum(rows * width for rows, width in runs)
    least = 1 << (total // (16 * count)).bit_length() >> 1
    found = []
    for rows, width in runs:
        if rows * width:
            together = max(1, min(rows, -(-least // width)))
            found += [(rows // together, together * width), (1, rows % together * width)]
    return tuple((rows, width) for rows, width in found if width)


@cached_on_device(64)
def table(runs: Runs, device: torch.device) -> RowTable:
    """Row by row. Kept, since they are the same at every step: they must not be written into."""
    numbers = torch.tensor([rows for rows, _ in runs], dtype=torch.int64)
    widths = torch.tensor([width for _, width in runs], dtype=torch.int64).repeat_interleave(numbers)
    return RowTable((widths.cumsum(0) - widths).to(device), widths.to(device))


def narrow_enough(runs: Runs, count: int) -> bool:
    """Whether all parameters are small enough for the remainders to be packed."""
    return count == 0 or all(width <= 2**32 for _, width in joined(runs, count))


@kernel
def encode_in_rows(indices: Tensor, runs: Runs) -> Tensor:
    """Rising positions as bytes."""
    count = indices.numel()
    if count == 0:
        return indices.new_zeros(0, dtype=torch.uint8)
    rows = table(joined(runs, count), indices.device)
    mine = torch.searchsorted(rows.starts, indices, right=True) - 1
    counts = torch.bincount(mine, minlength=rows.widths.numel())
    bits = _parameters(counts, rows.widths)[mine]
    within = indices - rows.starts[mine]
    gaps = torch.where(_leads(mine), within, within.diff(prepend=within[:1]) - 1)
    ones = ((gaps >> bits) + 1).cumsum(0) - 1
    return torch.cat(
        (
            *write_counts(counts, count),
            rice.set_bits(ones, int(ones[-1]) + 1),
            rice.pack_ragged(gaps & ((torch.ones_like(bits) << bits) - 1), bits),
        )
    )


@kernel
def decode_in_rows(data: Tensor, count: int, runs: Runs) -> tuple[Tensor, int]:
    """The first ``count`` positions of a message, and how many of its bytes they took.

    Raises:
        CorruptMessageError: The bytes are too few, or name no such positions.
    """
    if count == 0:
        return data.new_zeros(0, dtype=torch.int64), 0
    rows = table(joined(runs, count), data.device)
    counts, start = read_counts(data, rows.widths.numel(), count)
    if bool(((counts < 0) | (counts > rows.widths)).any()) or int(counts.sum()) != count:
        raise CorruptMessageError(f"the rows do not have {count} positions together; the message was damaged")
    bits = _parameters(counts, rows.widths)
    most = int((counts + ((rows.widths - counts) >> bits) * (counts > 0)).sum())
    ones = rice.find_bits(data[start : start + (most + 7) // 8])[:count]
    widths = bits.repeat_interleave(counts)
    middle = start + (int(ones[-1]) + 8) // 8 if ones.numel() == count else data.numel() + 1
    stop = middle + (int(widths.sum()) + 7) // 8
    if stop > data.numel():
        raise CorruptMessageError(
            f"{count} positions need more than {data.numel()} bytes; the message was cut short or damaged"
        )
    gaps = ((ones.diff(prepend=ones.new_full((1,), -1)) - 1) << widths) + rice.unpack_ragged(data[middle:stop], widths)
    return _positions(gaps, counts, rows), stop


def write_counts(counts: Tensor, count: int) -> tuple[Tensor, ...]:
    """How many positions each row has, all rows or only some being named, whichever is shorter."""
    rows, some, width = counts.numel(), counts.nonzero().flatten(), rice.width_of(count + 1)
    if some.numel() == rows:
        return _number(rows, counts.device), rice.encode_blocks(counts, width)
    named = (
        rice.encode_blocks(rice.gaps_of(some), rice.width_of(rows)),
        rice.encode_blocks(counts.index_select(0, some) - 1, width),
    )
    taken = sum(part.numel() for part in named)
    if taken >= 2 * rice.num_blocks(rows) + rows // 8:  # headers and a bit each: all rows take no less
        whole = rice.encode_blocks(counts, width)
        if whole.numel() <= taken:
            return _number(rows, counts.device), whole
    return _number(some.numel(), counts.device), *named


def read_counts(data: Tensor, rows: int, count: int) -> tuple[Tensor, int]:
    """The numbers that `write_counts` wrote, and how many bytes they took."""
    if data.numel() < _NUMBER:
        raise CorruptMessageError(f"a message of {data.numel()} bytes is too short for its number of rows")
    named, start = int.from_bytes(bytes(data[:_NUMBER].tolist()), "little"), _NUMBER
    if named > rows:
        raise CorruptMessageError(f"a message names {named} of {rows} rows; it was damaged")
    if named == rows:
        counts, used = rice.decode_blocks(data[start:], rows, rice.width_of(count + 1))
        return counts, start + used
    empty, used = rice.decode_blocks(data[start:], named, rice.width_of(rows))
    start += used
    counts, used = rice.decode_blocks(data[start:], named, rice.width_of(count + 1))
    at = (empty + 1).cumsum(0) - 1
    if bool(((at < 0) | (at >= rows)).any()):  # corrupt numbers may wrap around
        raise CorruptMessageError(f"a message names a row behind the last of {rows}; it was damaged")
    return data.new_zeros(rows, dtype=torch.int64).index_copy_(0, at, counts + 1), start + used


def _number(rows: int, device: torch.device) -> Tensor:
    return as_bytes(torch.full((1,), rows, dtype=torch.int32, device=device))


def _positions(gaps: Tensor, counts: Tensor, rows: RowTable) -> Tensor:
    mine = torch.arange(counts.numel(), device=gaps.device).repeat_interleave(counts)
    ahead = (gaps + 1).cumsum(0)
    before = torch.nn.functional.pad(ahead, (1, 0))[counts.cumsum(0) - counts]  # what earlier rows add up to
    within = ahead - before[mine] - 1
    if bool((within >= rows.widths[mine]).any()):
        raise CorruptMessageError("a row has a position behind its end; the message was damaged")
    return rows.starts[mine] + within


def _parameters(counts: Tensor, widths: Tensor) -> Tensor:
    """Each row's b. Doubles hold all widths exactly, and so the quotients' exponents."""
    mean = (widths - counts) // (counts + 1)
    return (torch.frexp(mean.double()).exponent.long() - 1).clamp(min=0)


def _leads(mine: Tensor) -> Tensor:
    """Which positions are the first of their row."""
    return mine.diff(prepend=mine.new_full((1,), -1)) != 0
