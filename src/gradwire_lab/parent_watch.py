"""Parent watch: a process ends within seconds of the one that started it, however that one ended."""

import ctypes
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

POLL_SECONDS = 1.0
GRACE_SECONDS = 5.0  # for an orderly end
LAUNCHER = "GRADWIRE_LAUNCHER"  # in the environment of a fork server: the process that started it
_PR_SET_PDEATHSIG = 1  # of Linux's prctl
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded before a fork, not after


def end_with_launcher(pipe: Connection) -> None:
    """End this rank at once with the fork server, and soon after the launcher's end of its pipe is closed."""
    set_signal_of_parents_end(signal.SIGKILL)
    ends = select.poll()
    ends.register(pipe.fileno(), 0)  # no event is asked for, so that only its end is reported
    if ends.poll(0):
        os._exit(1)  # the launcher, and perhaps the fork server, ended while this rank started
    _kill_after(ends.poll)


def end_with_parent(parent: int) -> None:
    """End this process, which ``parent`` has started, soon after it.

    The signal of Linux would come with the end of the thread that started it, while other threads live on.
    """

    def wait() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)

    _kill_after(wait)


def end_at_once_with(parent: int) -> None:
    """End this process at once with the thread of ``parent`` that started it, until `outlive_parent`."""
    set_signal_of_parents_end(signal.SIGKILL)
    if os.getppid() != parent:  # it has ended already
        os._exit(1)


def outlive_parent() -> None:
    """Undo `end_at_once_with`."""
    set_signal_of_parents_end(0)


def set_signal_of_parents_end(number: int) -> None:
    """Have Linux send this process a signal when the thread that started it ends; 0: none."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, number)


def _kill_after(wait: Callable[[], object]) -> None:
    def watch() -> None:
        wait()
        time.sleep(GRACE_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()
