"""Run lock: one process at a time trains in a run folder. The system takes the lock back when that process ends."""

import fcntl
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK = "run.lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make a run folder and hold its lock. What else is in it stays: training may still be refused.

    Raises:
        ValueError: The folder cannot be made or written, or another process trains in it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a+", encoding="utf-8")
    except OSError as wrong:
        raise ValueError(
            f"cannot make the folder {folder}, or write in it ({wrong.strerror}); name another place with --runs or "
            "--folder"
        ) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ValueError(
                f"{folder} is in use: {file.read() or 'another process'} trains in it; wait for its end, stop it, or "
                "train apart with --suffix"
            ) from None
        except OSError:  # a file system without locks
            pass
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def in_use(folder: Path) -> bool:
    """Whether a process that holds the lock may be alive; one of another host is taken to be.

    The lock itself is not tried, because a training that starts meanwhile would be refused.
    """
    try:
        held = re.fullmatch(r"process (\d+) on (.+)", (folder / LOCK).read_text(encoding="utf-8"))
        if held and held[2] == socket.gethostname():
            os.kill(int(held[1]), 0)
    except PermissionError:  # a process of another user
        return True
    except (OSError, OverflowError):  # there is no lock, or no such process
        return False
    return held is not None
