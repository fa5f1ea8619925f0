"""Large outputs, from a pool of buffers: fresh pages from the system cost more than the kernel that fills them."""

import weakref
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from gradwire.core.payload import with_spare_byte

_LARGE = 1 << 22  # below that, malloc has a pool of its own
_ROUND = 1 << 21  # the size of a large page
_MOST = 1 << 28  # bytes that may lie idle: all that a choice of half of 25.6 million entries takes

_idle: dict[int, NDArray[np.uint8]] = {}  # by identity, oldest first; touched in single steps: any thread may free


def pooled_empty(count: int, dtype: DTypeLike) -> NDArray[Any]:
    """An array with anything in it. Its memory comes back by itself when nothing refers to the array any more."""
    size = count * np.dtype(dtype).itemsize
    if size < _LARGE:
        return np.empty(count, dtype)
    memory = _take(-(-size // _ROUND) * _ROUND)
    array = np.frombuffer(memory.data, dtype, count)
    weakref.finalize(array, _return_to_pool, memory).atexit = False
    return array


def pooled_message(scales: int, body: int) -> tuple[Tensor, NDArray[np.float32], NDArray[np.uint8]]:
    """A message of so many scales and other bytes, with a spare byte for the status; and its two parts."""
    raw = pooled_empty(4 * scales + body + 1, np.uint8)
    message = with_spare_byte(torch.from_numpy(raw), raw.size - 1)
    return message, raw[: 4 * scales].view(np.float32), raw[4 * scales : -1]


def scales_and_rest(message: Tensor, scales: int) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """The two parts of a message that was received."""
    raw = message.numpy()
    return raw[: 4 * scales].copy().view(np.float32), raw[4 * scales :]


def _take(size: int) -> NDArray[np.uint8]:
    for memory in reversed(_held()):
        if memory.size == size and _idle.pop(id(memory), None) is not None:
            return memory
    return np.empty(size, np.uint8)


def _return_to_pool(memory: NDArray[np.uint8]) -> None:
    """Keep memory for later. If that is too much, free the oldest; the last one may be larger than the limit."""
    _idle[id(memory)] = memory
    held = _held()
    total = sum(idle.size for idle in held)
    for idle in held[:-1]:
        if total > _MOST and _idle.pop(id(idle), None) is not None:
            total -= idle.size


def _held() -> list[NDArray[np.uint8]]:
    """What lies idle. To list keys makes no objects, so no garbage is collected meanwhile, which may return more."""
    return [memory for key in list(_idle) if (memory := _idle.get(key)) is not None]
