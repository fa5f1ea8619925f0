"""Sharing: ranks that live in one process hear the same messages, and need not decode them once each.

Lockstep opens a round of sharing; whoever decodes for the group asks here first. Real ranks are alone in their
processes, and nothing is kept for them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from torch import Tensor

T = TypeVar("T")
_round: ContextVar[dict[tuple[Any, ...], tuple[Sequence[Tensor], Any]] | None] = ContextVar("sharing", default=None)


@contextmanager
def sharing() -> Iterator[None]:
    """Until the end, what one rank has decoded is there for the others."""
    token = _round.set({})
    try:
        yield
    finally:
        _round.reset(token)


def shared(heard: Sequence[Tensor], what: tuple[Any, ...], decode: Callable[[], T]) -> T:
    """``decode()``, or what it gave to another rank for the very same tensors; nobody may write into it.

    Args:
        heard: What the outcome was made of, if anything; tensors that share memory are the same.
        what: Whatever else the outcome depends on.
        decode: Called for the first rank that asks.
    """
    kept = _round.get()
    if kept is None:
        return decode()
    key = (*what, *((x.data_ptr(), x.numel()) for x in heard))
    if key not in kept:
        kept[key] = heard, decode()  # with the tensors, so that their memory is not reused meanwhile
    found: T = kept[key][1]
    return found
