"""Deferred checks: validation results that stay on the GPU and are read later.

A host that runs ahead of its GPU must not wait for a result. Inside of `defer_checks` results are collected for the
caller; elsewhere they are read at once.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

from gradwire.core.payload import CorruptMessageError

_deferred: ContextVar[list[Tensor] | None] = ContextVar("deferred", default=None)


@contextmanager
def defer_checks() -> Iterator[list[Tensor]]:
    """Until the end, results are not read but added to the list: tensors that are zero where a message is valid."""
    results: list[Tensor] = []
    token = _deferred.set(results)
    try:
        yield results
    finally:
        _deferred.reset(token)


def check(wrong: Tensor, error: str) -> bool:
    """Refuse a message if anything in ``wrong`` holds. Returns whether that was read: if not, it must do no harm.

    Raises:
        CorruptMessageError: Something does.
    """
    deferred = _deferred.get()
    if deferred is not None and wrong.device.type != "cpu":
        deferred.append(wrong)
        return False
    if wrong.any():
        raise CorruptMessageError(error)
    return True
