"""Doubts: what may be wrong with a message, where nobody waits for the device to say so.

A host that runs ahead of its GPU must not look at what the GPU finds. What would be refused is noted there, and whoever
opened the notes sees to it later. Where none are open, a look is taken at once.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

from gradwire.core.payload import CorruptMessageError

_notes: ContextVar[list[Tensor] | None] = ContextVar("doubts", default=None)


@contextmanager
def unseen() -> Iterator[list[Tensor]]:
    """Until the end, what is wrong is noted, as tensors that are zero where all is well, and nobody looks."""
    noted: list[Tensor] = []
    token = _notes.set(noted)
    try:
        yield noted
    finally:
        _notes.reset(token)


def refuse(wrong: Tensor, sentence: str) -> bool:
    """Refuse a message if anything in ``wrong`` holds. Gives whether anybody looked: if not, it must do no harm.

    Raises:
        CorruptMessageError: Something does.
    """
    noted = _notes.get()
    if noted is not None and wrong.device.type != "cpu":
        noted.append(wrong)
        return False
    if wrong.any():
        raise CorruptMessageError(sentence)
    return True
