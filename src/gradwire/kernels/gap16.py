"""Gaps between positions as 16-bit words, in plain torch. A filler advances 65535 and names no position."""

import torch
from torch import Tensor

from gradwire.core.keys import Key
from gradwire.core.payload import CorruptMessageError, as_bytes, from_bytes
from gradwire.kernels.philox import words
from gradwire.kernels.rice import gaps_of

FILLER = 0xFFFF


def gap16_encode(indices: Tensor) -> Tensor:
    """Rising positions -> uint8."""
    gaps = gaps_of(indices)
    ends = (gaps // FILLER + 1).cumsum(0)
    stream = gaps.new_full((int(ends[-1]) if len(ends) else 0,), FILLER)
    stream[ends - 1] = gaps % FILLER
    return as_bytes(stream.to(torch.int16))


def gap16_decode(data: Tensor, count: int, n: int) -> tuple[Tensor, int]:
    """``count`` positions below ``n``, and how many bytes they took.

    Raises:
        CorruptMessageError: There are fewer.
    """
    # What follows the stream belongs to others: look no further than the longest stream.
    longest = min(data.numel() // 2, count + n // FILLER)
    stream = from_bytes(data[: 2 * longest], torch.int16).long() & 0xFFFF
    named = stream != FILLER
    used = int(torch.searchsorted(named.cumsum(0), count)) + 1 if count else 0
    if used > longest:
        raise CorruptMessageError(
            f"{longest} words of gap16 name fewer than {count} positions; the message was cut short or damaged"
        )
    ahead = torch.where(named, stream + 1, FILLER)[:used].cumsum(0)
    return ahead[named[:used]] - 1, 2 * used


def drop_to_fit(indices: Tensor, room: int, key: Key) -> Tensor:
    """The positions left when just enough were dropped, in random order, to fit into ``room`` words.

    Dropping one position saves a word and costs one filler at most, so words never grow; and
    as fillers never exceed (n - 1) div 65535, at least one position stays.
    """
    excess = _num_words(indices) - room
    if excess <= 0:
        return indices
    order = words(key, "fit", indices.numel(), indices.device).argsort(stable=True)
    dropped, left = 0, indices
    while excess > 0:
        dropped += excess
        left = indices[order[dropped:].sort().values]
        excess = _num_words(left) - room
    return left


def _num_words(indices: Tensor) -> int:
    return int((gaps_of(indices) // FILLER + 1).sum())
