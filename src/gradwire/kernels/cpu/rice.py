"""Golomb-Rice codes for the CPU: each gap is written, and read, once. The format is that of `kernels.rice`."""

from inspect import unwrap

import numpy as np
import torch
from torch import Tensor

from gradwire.kernels import rice
from gradwire.kernels.cpu.packing import WORD, next_one, read_bits, write_bits
from gradwire.kernels.cpu.threads import serial


@serial
def _length(x):
    """The bits of a number; none for 0."""
    bits = 0
    while x:
        x >>= 1
        bits += 1
    return bits


@serial
def _plan(gaps, width, headers):
    """Choose every block's parameter, write its header, and count what follows."""
    quotients = remainders = escapes = 0
    for block in range(headers.size):
        own = gaps[block * rice.BLOCK : (block + 1) * rice.BLOCK]
        count = own.size
        total = lengths = 0
        for i in range(count):
            total += own[i]
            lengths += _length(own[i])
        best, least, excess, jumps = 0, np.int64(1) << 62, 0, 0
        for trial in range(7):  # of equals the first wins
            capped = trial >= 3
            center = lengths // count + 4 - trial if capped else _length(total // count) - trial
            bits = min(max(center, 0), rice.MOST_BITS)
            sent = beyond = 0
            for i in range(count):
                q = own[i] >> bits
                if capped and q >= rice.CAP:
                    q = rice.CAP
                    beyond += 1
                sent += q
            cost = sent + count * bits + 8 * width * beyond
            if cost < least and not (capped and sent > rice.MOST_EXCESS):
                best, least, excess, jumps = bits | capped << 5, cost, sent, beyond
        headers[block] = best | excess << 6
        quotients += count + excess
        remainders += count * (best & 31)
        escapes += jumps
    return quotients, remainders, escapes


@serial
def _write(gaps, width, headers, ones, rest, jumps):
    at = low = far = 0
    for i in range(gaps.size):
        head = headers[i // rice.BLOCK]
        bits, capped = head & 31, head >> 5 & 1
        q = gaps[i] >> bits
        if capped and q >= rice.CAP:
            beyond = q - rice.CAP
            for _ in range(width):
                jumps[far] = beyond & 0xFF
                beyond >>= 8
                far += 1
            q = rice.CAP
        at += q
        ones[at >> 3] |= 1 << (at & 7)
        at += 1
        write_bits(rest, low, gaps[i] & ((1 << bits) - 1))
        low += bits


@serial
def _read(headers, ones, rest, jumps, width, gaps):
    """Fill the gaps. Returns how many escapes there were; -1 where the bytes are not what a sender writes."""
    at = low = far = 0
    end = 8 * ones.size
    for block in range(headers.size):
        head = headers[block]
        bits, capped = head & 31, head >> 5 & 1
        stop = min(gaps.size, (block + 1) * rice.BLOCK)
        due = at + stop - block * rice.BLOCK + (head >> 6)
        for i in range(block * rice.BLOCK, stop):
            begun = at
            at = next_one(ones, at, end)
            q = at - begun
            at += 1
            if at > end:
                return -1
            if capped and q == rice.CAP:
                if far + width > jumps.size:
                    return -1
                for k in range(width):
                    q += np.int64(jumps[far + k]) << (8 * k)
                far += width
            gaps[i] = (q << bits) + read_bits(rest, low, bits)
            low += bits
        if at != due:
            return -1
    return far if next_one(ones, at, end) == end else -1


def encode_blocks(gaps: Tensor, width: int) -> Tensor:
    count = gaps.numel()
    if count == 0:
        return gaps.new_zeros(0, dtype=torch.uint8)
    numbers = gaps.contiguous().numpy()
    headers = np.empty(-(-count // rice.BLOCK), dtype=np.int64)
    quotients, remainders, escapes = _plan(numbers, width, headers)
    sizes = (2 * headers.size, (quotients + 7) // 8, (remainders + 7) // 8, width * escapes)
    message = np.zeros(sum(sizes) + WORD, dtype=np.uint8)
    head, ones, rest, jumps, _ = np.split(message, np.cumsum(sizes))
    head[:] = headers.astype("<u2").view(np.uint8)
    _write(numbers, width, headers, ones, rest, jumps)
    return torch.from_numpy(message[:-WORD])


def decode_blocks(data: Tensor, count: int, width: int) -> tuple[Tensor, int]:
    message = data.contiguous().numpy()
    start = 2 * -(-count // rice.BLOCK)
    headers = message[: min(start, message.size // 2 * 2)].view("<u2").astype(np.int64)
    gaps = np.empty(count, dtype=np.int64)
    sizes = np.full(headers.size, rice.BLOCK)
    sizes[-1:] = (count - 1) % rice.BLOCK + 1
    middle = start + (int((sizes + (headers >> 6)).sum()) + 7) // 8
    stop = middle + (int((sizes * (headers & 31)).sum()) + 7) // 8
    whole = count > 0 and 2 * headers.size == start and message.size >= stop
    far = -1
    if whole:
        streams = np.zeros(stop - start + WORD, dtype=np.uint8)
        streams[:-WORD] = message[start:stop]
        far = _read(headers, streams[: middle - start], streams[middle - start :], message[stop:], width, gaps)
    if far < 0:
        plainly: tuple[Tensor, int] = unwrap(rice.decode_blocks)(data, count, width)  # knows what to say of it
        return plainly
    return torch.from_numpy(gaps), stop + far
