"""One dispatcher: a kernel is defined once in plain torch, and replaced where a device has a faster version.

The definition is the law: `cpu` (Numba) and `cuda` (Triton) hold functions of the same names and signatures, and tests
compare them with it. ``GRADWIRE_KERNELS=reference`` in the environment, or `reference_only`, runs definitions alone.
"""

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, wraps
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

from torch import Tensor

from gradwire.core.layout import Scattered

P = ParamSpec("P")
R = TypeVar("R")

_NEEDS = {"cpu": "numba", "cuda": "triton"}
_reference = os.environ.get("GRADWIRE_KERNELS") == "reference"


def kernel(definition: Callable[P, R]) -> Callable[P, R]:
    """Decorate a definition in plain torch; the device of its first argument, a vector, decides."""
    name = definition.__name__

    @wraps(definition)
    def dispatched(*args: P.args, **named: P.kwargs) -> R:
        first = args[0]
        assert isinstance(first, Tensor | Scattered)
        fast = None if _reference else faster(first.device.type).get(name)
        return definition(*args, **named) if fast is None else fast(*args, **named)

    return dispatched


@lru_cache
def versions(device: str) -> ModuleType | None:
    """The faster versions for a kind of device; None when their compiler is not installed."""
    needed = _NEEDS.get(device)
    if needed is None or importlib.util.find_spec(needed) is None:
        return None
    return importlib.import_module(f"gradwire.kernels.{device}")


@lru_cache
def faster(device: str) -> dict[str, Callable[..., Any]]:
    """What a kind of device offers, by the names of definitions: the functions that its package imports."""
    module = versions(device)
    return {} if module is None else {name: x for name, x in vars(module).items() if callable(x)}


def offers(device: str, name: str) -> bool:
    """Whether a kind of device has a version of its own of this kernel, and may use it."""
    return not _reference and name in faster(device)


def accelerated() -> bool:
    """Whether anything but definitions may run."""
    return not _reference


@contextmanager
def reference_only() -> Iterator[None]:
    """Run definitions alone, on all threads, for as long as this lasts."""
    global _reference
    before, _reference = _reference, True
    try:
        yield
    finally:
        _reference = before
