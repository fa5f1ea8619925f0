"""Codes into bytes and back, piece by piece, the first code in the lowest bits.

A piece of a buffer need not begin at a whole byte. It then leaves the bits that belong to its neighbor's last byte in a
head, and `join` puts heads in when all pieces are written.
"""

import numpy as np

from gradwire.kernels.cpu.threads import inlined, serial
from gradwire.kernels.cpu.vectors import first_set, get, not_negative, put

WORD = 8  # bytes that are read and written at once
_BYTE = np.uint64(255)


@serial
def pack(codes, first, bits, out):
    """Write the codes from number ``first`` on into the whole message ``out``; returns the head."""
    begin = first * bits
    if begin % 8 == 0 and bits in (2, 4, 8):
        _pack_aligned(codes, bits, out[begin // 8 : (begin + codes.size * bits + 7) // 8])
        return np.uint8(0)
    return _pack_loose(codes, begin, bits, out)


@serial
def _pack_aligned(codes, bits, out):
    n = codes.size
    if bits == 8:
        for i in range(n):
            out[i] = codes[i]
    elif bits == 4:
        pairs = codes[: n // 2 * 2].reshape(n // 2, 2)
        for i in range(n // 2):
            out[i] = pairs[i, 0] | pairs[i, 1] << 4
        if n % 2:
            out[n // 2] = codes[n - 1]
    else:
        fours = codes[: n // 4 * 4].reshape(n // 4, 4)
        for i in range(n // 4):
            out[i] = fours[i, 0] | fours[i, 1] << 2 | fours[i, 2] << 4 | fours[i, 3] << 6
        if n % 4:
            _pack_loose(codes[n // 4 * 4 :], 0, 2, out[n // 4 :])


@serial
def _pack_loose(codes, begin, bits, out):
    """Any number of bits, from any bit on. What does not fit into whole words goes byte by byte."""
    held = np.uint64(0)
    count = begin % 8
    at = begin // 8
    end = (begin + codes.size * bits) // 8  # bytes before that are all this piece's
    shared = count > 0
    head = np.uint8(0)
    for i in range(codes.size):
        held |= np.uint64(codes[i]) << np.uint64(count)
        count += bits
        if not shared and at + 8 <= end:
            if count >= 32:
                put(out, at, held)  # its upper half is written again
                held >>= np.uint64(32)
                count -= 32
                at += 4
            continue
        while count >= 8:
            if shared:
                head = np.uint8(held & _BYTE)
                shared = False
            else:
                out[at] = np.uint8(held & _BYTE)
            held >>= np.uint64(8)
            count -= 8
            at += 1
    if count and shared:
        head = np.uint8(held & _BYTE)
    elif count:
        out[at] = np.uint8(held & _BYTE)
    return head


@serial
def join(starts, bits, heads, out):
    """Put the heads of all pieces in. What begins at a whole byte has an empty one."""
    for t in range(starts.size):
        if heads[t]:
            out[starts[t] * bits // 8] |= heads[t]


@serial
def unpack(data, first, bits, codes):
    """Read the codes from number ``first`` on; at most 17 bits each."""
    begin = first * bits
    n = codes.size
    if begin % 8 == 0 and bits in (2, 4, 8):
        each = 8 // bits
        whole = n // each
        _unpack_aligned(data[begin // 8 : begin // 8 + whole], bits, codes[: whole * each])
        for i in range(whole * each, n):
            codes[i] = _code(data, begin + i * bits, bits)
        return
    mask = np.uint64((1 << bits) - 1)
    safe = max(0, min(n, ((data.size - 8) * 8 - begin) // bits))  # where a whole word can be read
    for i in range(safe):
        bit = begin + i * bits
        codes[i] = get(data, bit >> 3) >> np.uint64(bit & 7) & mask
    for i in range(safe, n):
        codes[i] = _code(data, begin + i * bits, bits)


@serial
def _unpack_aligned(data, bits, codes):
    if bits == 8:
        for i in range(data.size):
            codes[i] = data[i]
    elif bits == 4:
        pairs = codes.reshape(data.size, 2)
        for i in range(data.size):
            pairs[i, 0] = data[i] & 15
            pairs[i, 1] = data[i] >> 4
    else:
        fours = codes.reshape(data.size, 4)
        for i in range(data.size):
            fours[i, 0] = data[i] & 3
            fours[i, 1] = data[i] >> 2 & 3
            fours[i, 2] = data[i] >> 4 & 3
            fours[i, 3] = data[i] >> 6


@serial
def _code(data, begin, bits):
    """One code, though the message may end in the middle of what is read."""
    word = np.uint64(0)
    for i in range(min(3, data.size - (begin >> 3))):
        word |= np.uint64(data[(begin >> 3) + i]) << np.uint64(8 * i)
    return word >> np.uint64(begin & 7) & np.uint64((1 << bits) - 1)


@inlined
def write_bits(data, bit, code):
    """Put a code of at most 57 bits where there are zeros. `WORD` bytes must be there from its first one on."""
    put(data, bit >> 3, get(data, bit >> 3) | np.uint64(code) << np.uint64(bit & 7))


@inlined
def read_bits(data, bit, bits):
    """The reverse."""
    return np.int64(get(data, bit >> 3) >> np.uint64(bit & 7)) & ((1 << bits) - 1)


@serial
def next_one(data, at, end):
    """The first set bit from ``at`` on; the end, if there is none before it. `WORD` bytes must follow."""
    while at < end:
        word = get(data, at >> 3) >> np.uint64(at & 7)
        if word:
            return min(end, at + first_set(word))
        at = (at & -8) + 64
    return end


@serial
def pack_signs(x, first, out):
    """One bit per value: whether it is >= 0. Returns the head."""
    skip = min(x.size, -first % 8)
    head = np.uint8(0)
    for j in range(skip):
        head |= np.uint8(x[j] >= 0.0) << (first % 8 + j)
    rest = x[skip:]
    at = (first + skip) // 8
    to = out[at : at + (rest.size + 7) // 8]
    for i in range(rest.size // 64):
        put(to, 8 * i, not_negative(rest, 64 * i))
    for i in range(rest.size // 64 * 8, to.size):
        byte = 0
        for j in range(8 * i, min(rest.size, 8 * i + 8)):
            byte |= (rest[j] >= 0.0) << (j & 7)
        to[i] = byte
    return head


@inlined
def sign_at(data, i):
    """One bit of a message."""
    return (data[i >> 3] >> (i & 7)) & 1


@inlined
def signs_at(data, i):
    """The 64 bits from number i on, a multiple of 8; all of them must be there."""
    return get(data, i >> 3)
