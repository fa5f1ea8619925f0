"""Numba's side of the house: compiled once, cached on disk, as many threads as torch has.

Kernels release the interpreter lock, and one of them runs at a time: Numba's simplest threading layer would not survive
two, and on the machines where it is chosen there is nothing better.

Loops become vectors only where Numba sees that no index is negative: they run from 0 over a slice.

Numba compiles a cached kernel again when its own file has changed, not when a function of another file that it calls
has: after such a change, delete this folder's ``__pycache__``.
"""

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numba
import numpy as np
import torch

from gradwire.core.layout import Scattered

P = ParamSpec("P")
R = TypeVar("R")

_turn = threading.RLock()
_SMALL = 1 << 18

# Multiply and add must round one after the other, as torch does: no fastmath, no contraction.
compiled: Callable[..., Any] = numba.njit(cache=True, nogil=True, parallel=True, error_model="numpy")
inlined: Callable[..., Any] = numba.njit(cache=True, nogil=True, inline="always", error_model="numpy")
serial: Callable[..., Any] = numba.njit(cache=True, nogil=True, error_model="numpy")
# Sums may be reordered where they are in float64, and end as one float32.
summing: Callable[..., Any] = numba.njit(cache=True, nogil=True, error_model="numpy", fastmath={"reassoc", "nsz"})


def in_turn(function: Callable[P, R]) -> Callable[P, R]:
    """Run a kernel's Python side alone, with torch's number of threads."""

    @wraps(function)
    def called(*args: P.args, **named: P.kwargs) -> R:
        with _turn, np.errstate(all="ignore"):  # what overflows is meant to, as in torch
            threads = torch.get_num_threads()
            numba.set_num_threads(_threads(args[0], threads))
            try:
                return function(*args, **named)
            finally:
                # Numba's first start sets OpenMP's number of threads, which is torch's as well.
                if torch.get_num_threads() != threads:
                    torch.set_num_threads(threads)

    return called


def _threads(first: object, most: int) -> int:
    # Waking a second thread costs more than a small tensor does.
    if isinstance(first, torch.Tensor | Scattered) and first.numel() < _SMALL:
        return 1
    available: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
    return max(1, min(most, available))
