"""Large outputs, lent from a shelf: fresh pages from the system cost more than the kernel that fills them."""

import weakref
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

_LARGE = 1 << 22  # below that, malloc has a shelf of its own
_ROUND = 1 << 21  # the size of a large page
_MOST = 1 << 27  # bytes that may lie idle

_idle: dict[int, list[NDArray[np.uint8]]] = {}  # by size; touched in single steps, since any thread may free


def lend(count: int, dtype: DTypeLike) -> NDArray[Any]:
    """An array with anything in it. Its memory comes back by itself when nothing refers to the array any more."""
    size = count * np.dtype(dtype).itemsize
    if size < _LARGE:
        return np.empty(count, dtype)
    memory = _take(-(-size // _ROUND) * _ROUND)
    lent = np.frombuffer(memory.data, dtype, count)
    weakref.finalize(lent, _bring_back, memory).atexit = False
    return lent


def _take(size: int) -> NDArray[np.uint8]:
    try:
        return _idle[size].pop()
    except LookupError:
        return np.empty(size, np.uint8)


def _bring_back(memory: NDArray[np.uint8]) -> None:
    if memory.size + sum(size * len(held) for size, held in tuple(_idle.items())) > _MOST:
        _idle.clear()
    _idle.setdefault(memory.size, []).append(memory)
