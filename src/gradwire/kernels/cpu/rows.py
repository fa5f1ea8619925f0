"""Codes of positions row by row, for the CPU: each position is looked at once. The format is that of `kernels.rows`."""

from functools import lru_cache
from inspect import unwrap

import numpy as np
import torch
from torch import Tensor

from gradwire.kernels import rows
from gradwire.kernels.cpu.packing import WORD, next_one, read_bits, write_bits
from gradwire.kernels.cpu.threads import serial


@serial
def _parameter(count, width):
    """A row's b, without a division."""
    least, bits = (count + 1) << 1, 0
    while least <= width - count:
        least <<= 1
        bits += 1
    return bits


@serial
def _write(indices, starts, widths, counts, ones, rest):
    """Count the positions of one row after the other, and write their gaps. Returns the bits of both parts."""
    at = low = begin = 0
    for row in range(starts.size):
        end = begin
        while end < indices.size and indices[end] < starts[row] + widths[row]:
            end += 1
        counts[row] = end - begin
        if end == begin:
            continue
        bits, last = _parameter(end - begin, widths[row]), starts[row] - 1
        for i in range(begin, end):
            gap = indices[i] - last - 1
            last = indices[i]
            at += gap >> bits
            ones[at >> 3] |= 1 << (at & 7)
            at += 1
            write_bits(rest, low, gap & ((1 << bits) - 1))
            low += bits
        begin = end
    return at, low


@serial
def _expect(counts, widths, count):
    """How many bits the quotients may have and the remainders do have; -1 where there are not ``count`` positions."""
    most = remainders = total = 0
    for row in range(counts.size):
        own, width = counts[row], widths[row]
        if not 0 <= own <= width:
            return -1, -1
        if own:
            bits = _parameter(own, width)
            most += own + (width - own >> bits)
            remainders += own * bits
            total += own
    return (most, remainders) if total == count else (-1, -1)


@serial
def _find(ones, places):
    """Where the first bits are set. Returns how many bits that took; -1 where so many are not set."""
    at, end = 0, 8 * (ones.size - WORD)
    for i in range(places.size):
        at = next_one(ones, at, end)
        if at == end:
            return -1
        places[i] = at
        at += 1
    return at


@serial
def _place(places, rest, counts, starts, widths):
    """Make positions of where the ones are. Returns whether all lie in their rows."""
    low, i, before = 0, 0, -1
    for row in range(counts.size):
        if not counts[row]:
            continue
        bits, within = _parameter(counts[row], widths[row]), -1
        for _ in range(counts[row]):
            quotient = places[i] - before - 1
            before = places[i]
            within += (quotient << bits) + read_bits(rest, low, bits) + 1
            low += bits
            places[i] = starts[row] + within
            i += 1
        if within >= widths[row]:
            return False
    return True


def encode_in_rows(indices: Tensor, runs: rows.Runs) -> Tensor:
    count = indices.numel()
    if count == 0:
        return indices.new_zeros(0, dtype=torch.uint8)
    starts, widths = _table(runs, count)
    counts = np.empty(starts.size, dtype=np.int64)
    ones = np.zeros(count // 2 + 1, dtype=np.uint8)  # 3c + 1 bits of a row at most
    each = (int(starts[-1] + widths[-1]) // count).bit_length()  # log2(n / k) bits at most, in the mean of all rows
    rest = np.zeros((count * each + 7) // 8 + WORD, dtype=np.uint8)
    quotients, remainders = _write(indices.contiguous().numpy(), starts, widths, counts, ones, rest)
    streams = ones[: (quotients + 7) // 8], rest[: (remainders + 7) // 8]
    return torch.cat((*rows.write_counts(torch.from_numpy(counts), count), *map(torch.from_numpy, streams)))


def decode_in_rows(data: Tensor, count: int, runs: rows.Runs) -> tuple[Tensor, int]:
    found = _read(data, count, *_table(runs, count)) if count else None
    if found is None:
        plainly: tuple[Tensor, int] = unwrap(rows.decode_in_rows)(data, count, runs)  # knows what to say of it
        return plainly
    return found


def _read(data: Tensor, count: int, starts: np.ndarray, widths: np.ndarray) -> tuple[Tensor, int] | None:
    """Positions, and how many bytes they took; None where the bytes are not what a sender writes."""
    table, start = rows.read_counts(data, starts.size, count)
    counts = table.numpy()
    most, remainders = _expect(counts, widths, count)
    if most < 0:
        return None
    streams = np.zeros((most + 7) // 8 + (remainders + 7) // 8 + WORD, dtype=np.uint8)
    own = data[start : start + streams.size - WORD].numpy()
    streams[: own.size] = own
    places = np.empty(count, dtype=np.int64)
    ending = _find(streams, places)
    middle = (ending + 7) // 8
    stop = middle + (remainders + 7) // 8
    if ending < 0 or stop > own.size or not _place(places, streams[middle:], counts, starts, widths):
        return None
    return torch.from_numpy(places), start + stop


@lru_cache(maxsize=64)
def _table(runs: rows.Runs, count: int) -> tuple[np.ndarray, np.ndarray]:
    starts, widths = rows.table(rows.joined(runs, count), torch.device("cpu"))
    return starts.numpy(), widths.numpy()
