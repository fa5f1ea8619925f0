"""Decode cache: ranks that live in one process receive the same messages, and need not decode them once each.

A lockstep opens the cache for one step. Real ranks are alone in their processes, and nothing is cached for them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from torch import Tensor

from gradwire.core.layout import address

T = TypeVar("T")
_cache: ContextVar[dict[tuple[Any, ...], tuple[Sequence[Tensor], Any]] | None] = ContextVar("decoded", default=None)


@contextmanager
def cached() -> Iterator[None]:
    """Until the end, ranks of this process share what they decode."""
    token = _cache.set({})
    try:
        yield
    finally:
        _cache.reset(token)


def shares_decoded() -> bool:
    """Whether several ranks use what one of them decodes."""
    return _cache.get() is not None


def memoized(inputs: Sequence[Tensor], facts: tuple[Any, ...], decode: Callable[[], T]) -> T:
    """``decode()``, or its result for another rank. The result must not be written into.

    Args:
        inputs: What the result is made of. Tensors that lie in the same memory are the same.
        facts: Whatever else the result depends on.
        decode: Called for the first rank that asks.
    """
    known = _cache.get()
    if known is None:
        return decode()
    key = (*facts, *((address(x), x.numel()) for x in inputs))
    if key not in known:
        known[key] = inputs, decode()  # with the inputs, so that their memory is not reused meanwhile
    result: T = known[key][1]
    return result
