"""Sharing: ranks that live in one process hear the same messages, and need not decode them once each.

Lockstep opens a round of sharing; whoever decodes for the group asks here first. Real ranks are alone in their
processes, and nothing is kept for them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from gradwire.core.payload import Payload

_Kept = dict[tuple[Any, ...], tuple[Sequence[Payload], Tensor]]
_round: ContextVar[_Kept | None] = ContextVar("sharing", default=None)


@contextmanager
def sharing() -> Iterator[None]:
    """Until the end, what one rank has decoded is there for the others."""
    token = _round.set({})
    try:
        yield
    finally:
        _round.reset(token)


def shared(payloads: Sequence[Payload], what: tuple[Any, ...], decode: Callable[[], Tensor]) -> Tensor:
    """``decode()``, or what it gave to another rank for the very same bytes; nobody may write into it.

    Args:
        payloads: The messages, if any; those that share memory are the same.
        what: Whatever else the outcome depends on.
        decode: Called for the first rank that asks.
    """
    kept = _round.get()
    if kept is None:
        return decode()
    key = (*what, *((payload.data.data_ptr(), payload.nbytes) for payload in payloads))
    if key not in kept:
        kept[key] = payloads, decode()  # with the messages, so that their memory is not reused meanwhile
    return kept[key][1]
