"""Golomb-Rice codes in blocks: gaps to bytes and back, every block with its own parameter.

The byte format, for ``count`` gaps in blocks of 512, the last block shorter. Bit i of a part is
bit i mod 8 of byte i div 8. A gap g under parameter b is q = g >> b and r = g & (2**b - 1). A
block may be *capped*: then each q of 8 or more is sent as 8, and q - 8 goes to the escapes, so
that a few long jumps do not dictate the b of a dense block.

    header      one 16-bit little-endian word per block: b in bits 0 to 4, whether the block is
                capped in bit 5, the sum E of the block's q as sent in bits 6 to 15
    quotients   q zeros and a one for each gap, all blocks one after another without a pause;
                a block takes (gaps in the block) + E bits; zeros fill the last byte
    remainders  r in b bits, least significant first, all blocks one after another without a
                pause; a block takes (gaps in the block) * b bits; zeros fill the last byte
    escapes     q - 8 in ``width`` little-endian bytes for each q sent as 8 in a capped block, in
                the order of the gaps; both sides know the width, which holds any gap

Lengths are in bits. The four parts follow one another at byte boundaries, and no gaps take no
bytes. Where a block starts in the two streams is a running sum over the headers, so blocks decode
in parallel; remainders of a block start at a multiple of 64 bytes of their part. Escapes are
patched in last.

Why E fits into 10 bits: of a block of c gaps, the b with the fewest bits c * b + E, the larger of
two, has E(b) < c + E(b + 1) <= c + E(b) / 2, that is E < 2c <= 1024; and where b stops at 31, gaps
that sum to less than 2**41 have E <= 1023. So every block can do without a cap. A capped block
whose E does not fit is not considered. A decoder takes any b, capped or not, but E must be what
the quotients say.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.core.payload import CorruptMessageError, as_bytes, from_bytes
from gradwire.kernels.dispatch import kernel

BLOCK = 512
CAP = 8
LIMIT = 2**41  # gaps of one message must sum to less
MOST_BITS = 31
MOST_EXCESS = 1023
_LOW = 0xFFFFFFFF


class Found(NamedTuple):
    """What several messages say.

    Attributes:
        indices: int64[messages, count]; of a corrupt message, anything below n.
        used: int64[messages], how many bytes the codes took.
        faults: int[messages, any]: not all zero if the message is corrupt.
    """

    indices: Tensor
    used: Tensor
    faults: Tensor


@kernel
def rice_encode(indices: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Rising positions below n as codes, and how many bytes those take, without waiting for that number.

    There is room for the longest codes, and all bytes behind the codes are zero.
    """
    count = indices.numel()
    coded = encode_blocks(gaps_of(indices), width_of(n))
    data = coded.new_zeros(most_bytes(count, n - count))
    data[: coded.numel()] = coded
    return data, torch.tensor(coded.numel(), device=indices.device)


@kernel
def rice_decode(data: Tensor, count: int, n: int) -> Found:
    """``count`` positions below n from each row of ``data``, uint8[messages, bytes]; see `Found` for damaged ones."""
    found, used, faults = [], [], []
    for row in data:
        try:
            gaps, taken = decode_blocks(row, count, width_of(n))
            indices = (gaps + 1).cumsum(0) - 1
        except CorruptMessageError:
            indices, taken = torch.full((count,), n, device=data.device), 0
        found.append(indices.clamp(0, n - 1))
        used.append(taken)
        faults.append(bool((indices != found[-1]).any()))
    return Found(torch.stack(found), torch.tensor(used), torch.tensor(faults, dtype=torch.int32)[:, None])


def gaps_of(indices: Tensor) -> Tensor:
    """How many positions are passed over before each one."""
    return torch.diff(indices, prepend=indices.new_full((1,), -1)) - 1


def width_of(n: int) -> int:
    """How many bytes hold any position below n."""
    return max(1, ((n - 1).bit_length() + 7) // 8)


def num_blocks(count: int) -> int:
    return (count + BLOCK - 1) // BLOCK


@lru_cache(maxsize=1024)
def most_bytes(count: int, total: int) -> int:
    """A bound on the bytes of any ``count`` gaps that sum to ``total`` at most; grows with both.

    One b for all blocks, none capped, takes count * (b + 1) + (total >> b) bits at most, and every
    block's own choice can only do better. The 14 are for the unfinished last bytes of two streams.
    """
    if count == 0:
        return 0
    streams = min(count * (b + 1) + (total >> b) for b in range(MOST_BITS + 1))
    return 2 * num_blocks(count) + (streams + 14) // 8


@kernel
def encode_blocks(gaps: Tensor, width: int) -> Tensor:
    """Gaps, int64 and not negative, their sum below `LIMIT`, as bytes. An escape takes width."""
    count = gaps.numel()
    if count == 0:
        return gaps.new_zeros(0, dtype=torch.uint8)
    counts = _counts(count, gaps.device)
    rows = torch.nn.functional.pad(gaps, (0, -count % BLOCK)).view(-1, BLOCK)
    bits, capped = _choose(rows, counts, width)
    quotients = rows >> bits[:, None]
    remainders = rows - (quotients << bits[:, None])
    escaped = capped[:, None] & (quotients >= CAP)
    sent = torch.where(escaped, CAP, quotients)
    header = bits | capped.long() << 5 | sent.sum(1) << 6
    ones = (sent.flatten()[:count] + 1).cumsum(0) - 1
    return torch.cat(
        (
            as_bytes(header.to(torch.int16)),
            set_bits(ones, int(ones[-1]) + 1),
            pack_ragged(remainders.flatten()[:count], bits.repeat_interleave(counts)),
            _pack_wide(quotients[escaped] - CAP, width),
        )
    )


@kernel
def decode_blocks(data: Tensor, count: int, width: int) -> tuple[Tensor, int]:
    """The first ``count`` gaps of a message, and how many of its bytes they took.

    Raises:
        CorruptMessageError: The bytes are too few, or the quotients are not what the headers say.
    """
    if count == 0:
        return data.new_zeros(0, dtype=torch.int64), 0
    start = 2 * num_blocks(count)
    _check_length(data, start, count)
    header = from_bytes(data[:start], torch.int16).long() & 0xFFFF
    bits, capped, excess = header & 31, (header >> 5 & 1).bool(), header >> 6
    counts = _counts(count, data.device)
    middle = start + (int((counts + excess).sum()) + 7) // 8
    stop = middle + (int((counts * bits).sum()) + 7) // 8
    _check_length(data, stop, count)
    quotients = _quotients(data[start:middle], counts, excess)
    escaped = capped.repeat_interleave(counts) & (quotients == CAP)
    used = stop + width * int(escaped.sum())
    _check_length(data, used, count)
    quotients[escaped] += _unpack_wide(data[stop:used], width)
    widths = bits.repeat_interleave(counts)
    return (quotients << widths) + unpack_ragged(data[middle:stop], widths), used


def set_bits(positions: Tensor, n: int) -> Tensor:
    """``n`` bits as bytes, in which just these are set. The positions differ and lie below n."""
    stream = positions.new_zeros((n + 7) // 8)
    weight = torch.ones_like(positions) << (positions & 7)
    return stream.index_add_(0, positions >> 3, weight).to(torch.uint8)


def find_bits(data: Tensor) -> Tensor:
    """The rising positions of all set bits."""
    place = torch.arange(8, dtype=torch.uint8, device=data.device)
    return (data[:, None] >> place & 1).flatten().nonzero().flatten()


def _counts(count: int, device: torch.device) -> Tensor:
    """How many gaps each block holds."""
    counts = torch.full((num_blocks(count),), BLOCK, dtype=torch.int64, device=device)
    counts[-1] = (count - 1) % BLOCK + 1
    return counts


def _choose(rows: Tensor, counts: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Each block's b and whether it is capped, by the fewest bits. [blocks, 512] -> 2 x [blocks].

    Without a cap the best b is certain to be tried: there E(b) < 2c, so 2**b > mean / 3; and
    E(b - 1) >= c, so 2**(b - 1) <= mean. That leaves three about log2(mean), and as the cost is
    convex in b, they may be clamped. With a cap those about the mean bit length are tried, which
    a few long jumps hardly move. Of equals the first is taken, so larger b win.
    """
    plain = _about(_bit_length(rows.sum(1) // counts) - 1, (1, 0, -1))
    robust = _about(_bit_length(rows).sum(1) // counts, (1, 0, -1, -2))
    costs = [_plain_cost(rows, counts, b) for b in plain]
    costs += [_capped_cost(rows, counts, b, width) for b in robust]
    best = torch.stack(costs).argmin(0, keepdim=True)
    bits = torch.stack(plain + robust).gather(0, best).flatten()
    return bits, best.flatten() >= len(plain)


def _about(center: Tensor, steps: tuple[int, ...]) -> list[Tensor]:
    return [(center + step).clamp(0, MOST_BITS) for step in steps]


def _bit_length(x: Tensor) -> Tensor:
    """The bits of each number; none for 0. Doubles hold all numbers below `LIMIT` exactly."""
    return torch.frexp(x.double()).exponent.long()


def _plain_cost(rows: Tensor, counts: Tensor, bits: Tensor) -> Tensor:
    return (rows >> bits[:, None]).sum(1) + counts * bits


def _capped_cost(rows: Tensor, counts: Tensor, bits: Tensor, width: int) -> Tensor:
    quotients = rows >> bits[:, None]
    excess = quotients.clamp(max=CAP).sum(1)
    cost = excess + counts * bits + 8 * width * (quotients >= CAP).sum(1)
    return torch.where(excess <= MOST_EXCESS, cost, LIMIT)


def _quotients(data: Tensor, counts: Tensor, excess: Tensor) -> Tensor:
    """The runs of zeros before each one, which must fill every block to its last bit."""
    ones = find_bits(data)
    if ones.numel() != int(counts.sum()):
        raise CorruptMessageError(
            f"the rice quotients end {ones.numel()} codes where {int(counts.sum())} were promised; "
            "the message was damaged"
        )
    if not torch.equal(ones[counts.cumsum(0) - 1] + 1, (counts + excess).cumsum(0)):
        raise CorruptMessageError("a rice block is longer or shorter than in its header; the message was damaged")
    return torch.diff(ones, prepend=ones.new_full((1,), -1)) - 1


def pack_ragged(codes: Tensor, widths: Tensor) -> Tensor:
    """Codes of ``widths`` bits each (31 at most), without a pause, as bytes."""
    ends = widths.cumsum(0)
    starts, total = ends - widths, int(ends[-1])
    words = codes.new_zeros(total // 32 + 2)
    wide = codes << (starts & 31)  # below 2**62: a code reaches into two words at most
    words.index_add_(0, starts >> 5, wide & _LOW)
    words.index_add_(0, (starts >> 5) + 1, wide >> 32)
    return as_bytes(words.to(torch.int32))[: (total + 7) // 8]


def unpack_ragged(data: Tensor, widths: Tensor) -> Tensor:
    """Codes of ``widths`` bits each, as int64. The bytes hold at least their sum."""
    starts = widths.cumsum(0) - widths
    padded = torch.nn.functional.pad(data, (0, -data.numel() % 4 + 8))
    words = from_bytes(padded, torch.int32).long() & _LOW
    first = starts >> 5
    wide = words[first] | words[first + 1] << 32
    return (wide >> (starts & 31)) & ((torch.ones_like(widths) << widths) - 1)


def _pack_wide(numbers: Tensor, width: int) -> Tensor:
    """Numbers of ``width`` little-endian bytes each."""
    place = 8 * torch.arange(width, device=numbers.device)
    return (numbers[:, None] >> place & 0xFF).to(torch.uint8).flatten()


def _unpack_wide(data: Tensor, width: int) -> Tensor:
    place = 8 * torch.arange(width, device=data.device)
    return (data.view(-1, width).long() << place).sum(1)


def _check_length(data: Tensor, needed: int, count: int) -> None:
    if data.numel() < needed:
        raise CorruptMessageError(
            f"{count} rice codes need {needed} bytes but only {data.numel()} are left; "
            "the message was cut short or damaged"
        )
