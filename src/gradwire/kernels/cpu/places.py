"""Places: a vector of floats that lies in one place or in several, read and written where it lies.

Kernels take both in the same types, so that nothing is compiled twice.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gradwire.core.layout import Flat, address
from gradwire.kernels.cpu.threads import serial


class Places(NamedTuple):
    """Parts of a vector."""

    memory: NDArray[np.float32]  # with whatever lies between the parts, which is never touched
    starts: NDArray[np.int64]  # of parts in the vector, and its end
    offsets: NDArray[np.int64]  # of parts in memory


class _Span:
    """Memory between two addresses, as NumPy asks for it."""

    def __init__(self, start: int, stop: int) -> None:
        self.__array_interface__: dict[str, Any] = {
            "data": (start, False), "shape": ((stop - start) // 4,), "typestr": "<f4", "version": 3
        }  # fmt: skip


def places(x: Flat | NDArray[np.float32]) -> Places:
    """Where a vector lies. Its tensors must outlive the answer."""
    if isinstance(x, np.ndarray | Tensor):
        memory = x if isinstance(x, np.ndarray) else x.detach().numpy()
        return Places(memory, np.array([0, memory.size]), np.zeros(1, dtype=np.int64))
    parts = [part for part in x.parts if part.numel()]
    if not parts:
        return places(np.empty(0, dtype=np.float32))
    at = np.array([address(part) for part in parts])
    lengths = np.array([part.numel() for part in parts])
    first, end = int(at.min()), int((at + 4 * lengths).max())
    return Places(np.asarray(_Span(first, end)), np.concatenate(([0], lengths.cumsum())), (at - first) // 4)


@serial
def carry(old, new):
    for j in range(new.size):  # an assignment of slices would look for an overlap, and is not a plain copy
        new[j] = old[j]


@serial
def stretch(x, a, b):
    """The entries ``[a, b)``: where they lie, if that is one place, else a copy, which `leave` writes back."""
    r = np.searchsorted(x.starts, a, side="right") - 1
    at = x.offsets[r] - x.starts[r]
    if b <= x.starts[r + 1]:
        return x.memory[at + a : at + b]
    out = np.empty(b - a, dtype=np.float32)
    _move(x, a, b, r, out, False)
    return out


@serial
def leave(x, a, b, values):
    """Write what a stretch has become to where it lies, if it is a copy."""
    r = np.searchsorted(x.starts, a, side="right") - 1
    if b > x.starts[r + 1]:
        _move(x, a, b, r, values, True)


@serial
def _move(x, a, b, r, values, home):
    j = a
    while j < b:
        stop = min(b, x.starts[r + 1])
        at = x.offsets[r] - x.starts[r]
        there, here = x.memory[at + j : at + stop], values[j - a : stop - a]
        if home:
            carry(here, there)
        else:
            carry(there, here)
        j = stop
        r += 1
