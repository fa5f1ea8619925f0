"""Signals around something that must be built or taken down as a whole.

SIGTERM and SIGHUP end a Python process on the spot, so while hosts stand they raise ``SystemExit`` instead. While they
are taken down, or a rank is started, signals are held back and delivered afterwards.
"""

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import NoReturn


@contextmanager
def signals_raise(error: Callable[[int], BaseException], *numbers: signal.Signals) -> Iterator[None]:
    """Let signals that would kill this process raise an error instead, which is made of their number."""

    def handle(number: int, frame: FrameType | None) -> NoReturn:
        raise error(number)

    with _handled(handle, [number for number in numbers if signal.getsignal(number) == signal.SIG_DFL]):
        yield


def sigterm_interrupts() -> AbstractContextManager[None]:
    """SIGTERM ends a command as Ctrl-C does, so that no process that was started here is left behind."""
    return signals_raise(lambda number: KeyboardInterrupt(), signal.SIGTERM)


@contextmanager
def signals_deferred() -> Iterator[None]:
    """Put signals off to the end of the block."""
    received: list[int] = []
    try:
        with _handled(lambda number, _: received.append(number), (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)):
            yield
    finally:
        for late in received:
            signal.raise_signal(late)


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], object], numbers: Iterable[signal.Signals]) -> Iterator[None]:
    """Handle signals within the block; not in other threads than the main one, which cannot set handlers."""
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number in numbers if is_main}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
