"""Codes of values, piece by piece: a piece's codes stay in cache between being made and being packed."""

import numpy as np
from numba import prange

from gradwire.kernels.cpu import scales
from gradwire.kernels.cpu.packing import pack, unpack
from gradwire.kernels.cpu.places import leave, stretch
from gradwire.kernels.cpu.random import uniform
from gradwire.kernels.cpu.threads import compiled, serial
from gradwire.kernels.cpu.vectors import as_float

TRIT_TILE = 5 * 512  # whole bytes of trits
LARGEST, NORM = range(2)


@serial
def scale_of(x, what):
    """The scale of one group."""
    return scales.norm(x) if what == NORM else as_float(np.uint32(scales.largest(x)))


@serial
def nearest(x, scale, levels, codes):
    """The nearest of ``levels`` even parts of the scale, on either side of zero."""
    divisor = scale if scale != 0.0 else np.float32(1.0)
    most = np.float32(levels)
    for i in range(x.size):
        codes[i] = levels + np.int32(np.rint(x[i] / divisor * most))


@serial
def by_chance(x, u, scale, levels, codes):
    """One of the two nearest, the nearer more often."""
    divisor = scale if scale != 0.0 else np.float32(1.0)
    most = np.float32(levels)
    for i in range(x.size):
        level = abs(x[i]) / divisor * most
        low = np.floor(level)
        q = np.int32(low) + np.int32(u[i] < level - low)
        codes[i] = levels + (q if x[i] >= 0.0 else -q)


@serial
def levels_of(codes, scale, levels, out):
    """``scale * (code - levels) / levels``."""
    most = np.float32(levels)
    for i in range(codes.size):
        out[i] = scale * (np.float32(np.int32(codes[i]) - levels) / most)


@serial
def leave_rounding(x, a, group, block, levels, bits, group_scales, codes, out):
    """Round a piece that begins at entry ``a`` and at a block, pack its codes, and leave what they do not say."""
    decoded = np.empty(min(block, x.size), dtype=np.float32)
    for i in range((x.size + block - 1) // block):
        part, own = x[i * block : (i + 1) * block], codes[i * block : (i + 1) * block]
        scale = scale_of(part, LARGEST)
        group_scales[group + i] = scale
        nearest(part, scale, levels, own)
        levels_of(own, scale, levels, decoded)
        for j in range(part.size):
            part[j] = part[j] - decoded[j]
    return pack(codes, a, bits, out)


@serial
def decode_piece(data, a, group, block, levels, bits, group_scales, codes, out):
    """The entries from ``a`` on, where a block begins, by way of their codes."""
    unpack(data, a, bits, codes)
    for i in range((out.size + block - 1) // block):
        own = slice(i * block, (i + 1) * block)
        levels_of(codes[own], group_scales[group + i], levels, out[own])


@compiled
def encode(x, pieces, block, what, known, group_scales, keys, step, levels, bits, chance, heads, out):
    """Codes of all groups, whose scales are made on the way unless they are known."""
    for t in prange(pieces.start.size):
        a, b = pieces.start[t], pieces.stop[t]
        piece = stretch(x, a, b)
        codes = np.empty(b - a, dtype=np.uint32)
        k = keys[pieces.segment[t] if chance else 0]
        u = uniform(pieces.offset[t], b - a if chance else 0, step, k[0], k[1])
        for i in range((b - a + block - 1) // block):
            lo, hi = i * block, min(b - a, (i + 1) * block)
            g = pieces.group[t] + i
            if not known:
                group_scales[g] = scale_of(piece[lo:hi], what)
            if chance:
                by_chance(piece[lo:hi], u[lo:hi], group_scales[g], levels, codes[lo:hi])
            else:
                nearest(piece[lo:hi], group_scales[g], levels, codes[lo:hi])
        heads[t] = pack(codes, a, bits, out)


@compiled
def decode(data, pieces, block, group_scales, levels, bits, out):
    for t in prange(pieces.start.size):
        a, b = pieces.start[t], pieces.stop[t]
        piece, codes = stretch(out, a, b), np.empty(b - a, dtype=np.uint32)
        decode_piece(data, a, pieces.group[t], block, levels, bits, group_scales, codes, piece)
        leave(out, a, b, piece)


@serial
def _trits(x, u, scale, limit, trits):
    divisor = scale if scale != 0.0 else np.float32(1.0)
    for i in range(x.size):
        kept = np.int32(u[i] < min(abs(x[i]), limit) / divisor)
        trits[i] = 1 + (kept if x[i] >= 0.0 else -kept)


@serial
def _five_a_byte(trits, out):
    rows = trits.reshape(out.size, 5)
    for i in range(out.size):
        out[i] = rows[i, 0] + 3 * rows[i, 1] + 9 * rows[i, 2] + 27 * rows[i, 3] + 81 * rows[i, 4]


@compiled
def encode_trits(x, ends, limits, group_scales, keys, step, out):
    """Clamp, keep a sign with chance |x| / scale, five trits a byte."""
    n = x.size
    for t in prange((n + TRIT_TILE - 1) // TRIT_TILE):
        a, b = t * TRIT_TILE, min(n, (t + 1) * TRIT_TILE)
        trits = np.zeros((b - a + 4) // 5 * 5, dtype=np.uint8)
        s = np.searchsorted(ends, a, side="right")
        j = a
        while j < b:
            stop = min(b, ends[s])
            begin = ends[s - 1] if s else 0
            u = uniform(j - begin, stop - j, step, keys[s, 0], keys[s, 1])
            _trits(x[j:stop], u, group_scales[s], limits[s], trits[j - a : stop - a])
            j = stop
            s += 1
        _five_a_byte(trits, out[a // 5 : a // 5 + trits.size // 5])


@serial
def _three_levels(trits, scale, out):
    for i in range(out.size):
        out[i] = scale * np.float32(np.int32(trits[i]) - 1)


@compiled
def decode_trits(data, ends, group_scales, out):
    """``scale * (trit - 1)``."""
    n = out.size
    for t in prange((n + TRIT_TILE - 1) // TRIT_TILE):
        a, b = t * TRIT_TILE, min(n, (t + 1) * TRIT_TILE)
        read = data[a // 5 : (b + 4) // 5]
        trits = np.empty((read.size, 5), dtype=np.uint8)
        for i in range(read.size):
            byte = np.int32(read[i])
            for j in range(5):
                trits[i, j] = byte % 3
                byte //= 3
        flat = trits.reshape(trits.size)
        s = np.searchsorted(ends, a, side="right")
        j = a
        while j < b:
            stop = min(b, ends[s])
            _three_levels(flat[j - a : stop - a], group_scales[s], out[j:stop])
            j = stop
            s += 1


@serial
def _powers(raw, u, codes):
    for i in range(raw.size):
        exponent = (raw[i] >> 23) & 0xFF
        up = u[i] < np.float32(raw[i] & 0x7FFFFF) * np.float32(2.0**-23)
        rounded = max(exponent, min(exponent + np.int32(up), np.int32(254)))
        codes[i] = rounded | (np.int32(raw[i] < 0) << 8)


@compiled
def encode_powers(raw, pieces, keys, step, heads, out):
    """Sign and exponent, the exponent raised with the mantissa's chance. ``raw`` are the values' bits."""
    for t in prange(pieces.start.size):
        a, b = pieces.start[t], pieces.stop[t]
        k = keys[pieces.segment[t]]
        codes = np.empty(b - a, dtype=np.uint32)
        _powers(raw[a:b], uniform(pieces.offset[t], b - a, step, k[0], k[1]), codes)
        heads[t] = pack(codes, a, 9, out)


@compiled
def decode_powers(data, pieces, out):
    """The bits of a power of two, and its sign. ``out`` are the values' bits."""
    for t in prange(pieces.start.size):
        a, b = pieces.start[t], pieces.stop[t]
        codes = np.empty(b - a, dtype=np.uint32)
        unpack(data, a, 9, codes)
        piece = out[a:b]
        for i in range(b - a):
            code = codes[i]
            piece[i] = np.int32((code & np.uint32(255)) << np.uint32(23)) | np.int32(code >> np.uint32(8)) << 31
