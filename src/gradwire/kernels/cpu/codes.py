"""Codes and their packing, tile by tile: a tile's codes stay in cache between being made and being packed."""

import numpy as np
from numba import prange

from gradwire.kernels.cpu.random import block, unit
from gradwire.kernels.cpu.threads import compiled, inlined, serial

TILE = 8 * 5 * 512  # whole bytes at any width of code, and whole bytes of trits


@serial
def draw(u, p0, p1, step, k0, k1):
    """Uniform numbers of elements p0 to p1 of a stream; element q goes to ``u[q - p0 // 4 * 4]``."""
    base = p0 // 4
    for b in range((p1 + 3) // 4 - base):
        w0, w1, w2, w3 = block(np.uint64(base + b), step, k0, k1)
        u[4 * b] = unit(w0)
        u[4 * b + 1] = unit(w1)
        u[4 * b + 2] = unit(w2)
        u[4 * b + 3] = unit(w3)


@serial
def uniform_of_tile(u, loose, a, b, ends, keys, step):
    """``u[j - a]`` for flat elements a to b, whichever segments they lie in. ``loose`` is room for one more block."""
    s = np.searchsorted(ends, a, side="right")
    while a < b:
        stop = min(b, ends[s])
        start = ends[s - 1] if s else 0
        draw(loose, a - start, stop - start, step, keys[s, 0], keys[s, 1])
        skip = (a - start) % 4
        u[: stop - a] = loose[skip : skip + stop - a]
        u = u[stop - a :]
        a = stop
        s += 1


@serial
def pack_tile(codes, bits, out):
    """Codes into bytes, the first in the lowest bits."""
    n = codes.size
    if bits == 8:
        for i in range(n):
            out[i] = codes[i]
        return
    if bits == 4:
        for i in range(n // 2):
            out[i] = codes[2 * i] | codes[2 * i + 1] << 4
        if n % 2:
            out[n // 2] = codes[n - 1]
        return
    held = np.uint64(0)
    count = 0
    at = 0
    for i in range(n):
        held |= np.uint64(codes[i]) << np.uint64(count)
        count += bits
        while count >= 8:
            out[at] = np.uint8(held & np.uint64(255))
            held >>= np.uint64(8)
            count -= 8
            at += 1
    if count:
        out[at] = np.uint8(held)


@inlined
def code_at(data, i, bits, mask):
    """The i-th code of a packed stream of at most 17 bits each."""
    first = i * bits
    at = first >> 3
    word = np.uint32(data[at])
    if at + 1 < data.size:
        word |= np.uint32(data[at + 1]) << np.uint32(8)
    if at + 2 < data.size:
        word |= np.uint32(data[at + 2]) << np.uint32(16)
    return (word >> np.uint32(first & 7)) & mask


@compiled
def encode(x, ends, scales, group_ends, keys, step, levels, bits, chance, out):
    """Levels of each group's scale; rounded at random (``chance``) or to the nearest."""
    n = x.size
    most = np.float32(levels)
    for t in prange((n + TILE - 1) // TILE):
        a, b = t * TILE, min(n, (t + 1) * TILE)
        codes = np.empty(b - a, dtype=np.uint32)
        u = np.empty(b - a if chance else 0, dtype=np.float32)
        if chance:
            uniform_of_tile(u, np.empty(b - a + 8, dtype=np.float32), a, b, ends, keys, step)
        g = np.searchsorted(group_ends, a, side="right")
        j = a
        while j < b:
            stop = min(b, group_ends[g])
            scale = scales[g] if scales[g] != 0.0 else np.float32(1.0)
            if chance:
                for i in range(j, stop):
                    level = abs(x[i]) / scale * most
                    low = np.floor(level)
                    q = np.int32(low) + np.int32(u[i - a] < level - low)
                    codes[i - a] = levels + (q if x[i] >= 0.0 else -q)
            else:
                for i in range(j, stop):
                    codes[i - a] = levels + np.int32(np.rint(x[i] / scale * most))
            j = stop
            g += 1
        pack_tile(codes, bits, out[a * bits // 8 : (b * bits + 7) // 8])


@compiled
def decode(data, scales, group_ends, table, bits, out):
    """``scale * table[code]``."""
    n = out.size
    mask = np.uint32((1 << bits) - 1)
    last = np.uint32(table.size - 1)
    for t in prange((n + TILE - 1) // TILE):
        a, b = t * TILE, min(n, (t + 1) * TILE)
        g = np.searchsorted(group_ends, a, side="right")
        j = a
        while j < b:
            stop = min(b, group_ends[g])
            scale = scales[g]
            for i in range(j, stop):
                # A damaged message may hold a code that was never written; it must not read past the table.
                out[i] = scale * table[min(code_at(data, i, bits, mask), last)]
            j = stop
            g += 1


@compiled
def encode_signs(x, out):
    """One bit per value: whether it is >= 0."""
    n = x.size
    whole = n // 8
    for t in prange((whole + 4095) // 4096):
        for i in range(t * 4096, min(whole, (t + 1) * 4096)):
            byte = 0
            for j in range(8):
                byte |= (x[8 * i + j] >= 0.0) << j
            out[i] = byte
    if n % 8:
        byte = 0
        for j in range(n % 8):
            byte |= (x[8 * whole + j] >= 0.0) << j
        out[whole] = byte


@compiled
def decode_signs(data, ends, above, below, out):
    """Each segment's upper number where the bit is set, else its lower one."""
    n = out.size
    for t in prange((n + TILE - 1) // TILE):
        a, b = t * TILE, min(n, (t + 1) * TILE)
        s = np.searchsorted(ends, a, side="right")
        while a < b:
            stop = min(b, ends[s])
            up, down = above[s], below[s]
            for i in range(a, stop):
                out[i] = up if (data[i >> 3] >> (i & 7)) & 1 else down
            a = stop
            s += 1


@compiled
def encode_trits(x, ends, limits, scales, keys, step, out):
    """Clamp, keep a sign with chance |x| / scale, five trits a byte."""
    n = x.size
    for t in prange((n + TILE - 1) // TILE):
        a, b = t * TILE, min(n, (t + 1) * TILE)
        u = np.empty(b - a, dtype=np.float32)
        uniform_of_tile(u, np.empty(b - a + 8, dtype=np.float32), a, b, ends, keys, step)
        trits = np.zeros((b - a + 4) // 5 * 5, dtype=np.uint8)
        s = np.searchsorted(ends, a, side="right")
        j = a
        while j < b:
            stop = min(b, ends[s])
            scale = scales[s] if scales[s] != 0.0 else np.float32(1.0)
            limit = limits[s]
            for i in range(j, stop):
                size = min(abs(x[i]), limit)
                kept = u[i - a] < size / scale
                trits[i - a] = 1 + (kept if x[i] >= 0.0 else -np.int8(kept))
            j = stop
            s += 1
        at = a // 5
        for i in range(trits.size // 5):
            first = 5 * i
            out[at + i] = (
                trits[first]
                + 3 * trits[first + 1]
                + 9 * trits[first + 2]
                + 27 * trits[first + 3]
                + 81 * trits[first + 4]
            )


@compiled
def decode_trits(data, ends, scales, out):
    """``scale * (trit - 1)``."""
    n = out.size
    for t in prange((n + TILE - 1) // TILE):
        a, b = t * TILE, min(n, (t + 1) * TILE)
        trits = np.empty((b - a + 4) // 5 * 5, dtype=np.int32)
        for i in range(trits.size // 5):
            byte = np.int32(data[a // 5 + i])
            for j in range(5):
                trits[5 * i + j] = byte % 3
                byte //= 3
        s = np.searchsorted(ends, a, side="right")
        j = a
        while j < b:
            stop = min(b, ends[s])
            for i in range(j, stop):
                out[i] = scales[s] * np.float32(trits[i - a] - 1)
            j = stop
            s += 1


@compiled
def encode_powers(raw, ends, keys, step, out):
    """Sign and exponent, the exponent raised with the mantissa's chance. ``raw`` are the values' bits."""
    n = raw.size
    for t in prange((n + TILE - 1) // TILE):
        a, b = t * TILE, min(n, (t + 1) * TILE)
        u = np.empty(b - a, dtype=np.float32)
        uniform_of_tile(u, np.empty(b - a + 8, dtype=np.float32), a, b, ends, keys, step)
        codes = np.empty(b - a, dtype=np.uint32)
        for i in range(a, b):
            exponent = (raw[i] >> 23) & 0xFF
            up = u[i - a] < np.float32(raw[i] & 0x7FFFFF) * np.float32(2.0**-23)
            rounded = max(exponent, min(exponent + np.int32(up), np.int32(254)))
            codes[i - a] = rounded | (np.int32(raw[i] < 0) << 8)
        pack_tile(codes, 9, out[a * 9 // 8 : (b * 9 + 7) // 8])


@compiled
def decode_powers(data, out):
    """The bits of a power of two, and its sign. ``out`` are the values' bits."""
    n = out.size
    for t in prange((n + TILE - 1) // TILE):
        for i in range(t * TILE, min(n, (t + 1) * TILE)):
            code = code_at(data, i, 9, np.uint32(511))
            out[i] = np.int32((code & np.uint32(255)) << np.uint32(23)) | np.int32(code >> np.uint32(8)) << 31
