"""Signals around something that must be built or taken down as a whole.

SIGTERM and SIGHUP end a Python process on the spot, so while hosts stand they raise ``SystemExit`` instead. While they
are taken down, or a rank is started, signals are held back and delivered afterwards.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

_Handler = Callable[[int, FrameType | None], object] | int | None


class SignalsAsExceptions:
    """Turns the signals that would kill this process into exceptions, until released."""

    def __init__(self) -> None:
        self._before: dict[signal.Signals, _Handler] = {}

    def arm(self) -> None:
        if threading.current_thread() is not threading.main_thread():  # others cannot set handlers
            return
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) == signal.SIG_DFL:
                self._before[number] = signal.signal(number, _exit)

    def release(self) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler)


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    del frame
    raise SystemExit(128 + number)


@contextmanager
def signals_deferred() -> Iterator[None]:
    """Put signals off to the end of the block."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda number, _: received.append(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for late in received:
            signal.raise_signal(late)
