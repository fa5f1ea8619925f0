"""Gradients of 16 bits: read as they lie, and widened a tile at a time, while the tile is in cache.

Kernels take a gradient of either width, in one place or in several, in the same types, so that nothing is compiled
twice. One of 16 bits lies in one place.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwire.core.layout import Flat
from gradwire.kernels.cpu import places
from gradwire.kernels.cpu.threads import inlined, serial
from gradwire.kernels.cpu.vectors import as_bits, as_float

_NO_FLOATS, _NO_HALVES = np.zeros(0, dtype=np.float32), np.zeros(0, dtype=np.uint16)
_TOP = np.uint32(0x7C00)  # the exponent of float16, full in what is not finite
_REBIAS = np.float32(2.0**112)  # between the exponents of float32 and float16
_LAST = np.float32(2.0**-24)  # the last place of float16's subnormals


class Gradient(NamedTuple):
    """A gradient in one of two widths; the other is empty."""

    memory: NDArray[np.float32]  # these three are `places.Places`
    starts: NDArray[np.int64]
    offsets: NDArray[np.int64]
    halves: NDArray[np.uint16]
    is_float16: bool  # else bfloat16


def gradient(grad: Flat) -> Gradient:
    """A gradient as it lies, if its parts have no gaps and kernels know its type; else a copy in float32."""
    if not isinstance(grad, Tensor):
        return plain(grad)
    grad = grad.detach().contiguous()
    if grad.dtype in (torch.float16, torch.bfloat16):
        halves = grad.view(torch.int16).numpy().view(np.uint16)
        return Gradient(*places.places(_NO_FLOATS), halves, grad.dtype == torch.float16)
    return plain(grad.float())


def plain(x: Flat | NDArray[np.float32]) -> Gradient:
    return Gradient(*places.places(x), _NO_HALVES, False)


@inlined
def _float16(half):
    raw = np.uint32(half)
    size = raw & np.uint32(0x7FFF)
    normal = as_bits(as_float(size << np.uint32(13)) * _REBIAS)
    small = as_bits(np.float32(np.int32(size)) * _LAST)
    broken = size << np.uint32(13) | np.uint32(0x7F800000)
    exponent = size & _TOP
    bits = broken if exponent == _TOP else normal
    bits = small if exponent == np.uint32(0) else bits
    return bits | (raw & np.uint32(0x8000)) << np.uint32(16)


@serial
def _widen(halves, is_float16, out):
    bits = out.view(np.uint32)
    if is_float16:
        for j in range(halves.size):
            bits[j] = _float16(halves[j])
    else:
        for j in range(halves.size):
            bits[j] = np.uint32(halves[j]) << np.uint32(16)


@serial
def stretch(grad, a, b):
    """The entries ``[a, b)`` in float32."""
    if grad.halves.size == 0:
        return places.stretch(grad, a, b)
    out = np.empty(b - a, dtype=np.float32)
    _widen(grad.halves[a:b], grad.is_float16, out)
    return out
