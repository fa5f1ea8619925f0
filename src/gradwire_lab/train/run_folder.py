"""Run folders: what a training has left there, which process trains in one, and why a training failed.

run.lock      held by the one process that trains there; the system takes the lock back when that process ends
failure.txt   why a training ended with an error, in one line, for the process that started it
"""

import fcntl
import json
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

LOCK = "run.lock"
NOTE = "failure.txt"
_RAISED = re.compile(r"[A-Za-z_][\w.]*: .")  # the line of a traceback that names the error


def read(folder: Path) -> list[dict[str, Any]]:
    """The records of a run."""
    return [record for record in json_lines(folder / "run.jsonl") if "event" in record]


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file, one a line; a last line that was cut off, and whatever else is none, is left out."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    objects = []
    for line in lines:
        with suppress(ValueError, RecursionError):
            objects.append(json.loads(line))
    return [each for each in objects if isinstance(each, dict)]


def begun(folder: Path) -> bool:
    """Whether a folder holds more of a run than its start: a step, a checkpoint, or a log that cannot be read."""
    log, records = folder / "run.jsonl", read(folder)
    foreign = not records and log.is_file() and bool(log.read_bytes().strip())
    return foreign or (folder / "checkpoints").exists() or any(record["event"] != "start" for record in records)


# -- who trains there --------------------------------------------------------------------------------------------------


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


# -- why it failed -----------------------------------------------------------------------------------------------------


@contextmanager
def noting_failure(folder: Path) -> Iterator[None]:
    """Write the cause of an error into a folder. A ValueError is a refusal, which leaves nothing there."""
    note = folder / NOTE
    with suppress(OSError):
        note.unlink(missing_ok=True)
    try:
        yield
    except ValueError:
        raise
    except Exception as wrong:
        with suppress(OSError):  # such as a full disk, which may be the cause
            note.write_text(f"{cause(wrong)}\n", encoding="utf-8")
        raise


def noted_failure(folder: Path) -> str:
    """The cause that was written there last; empty without one."""
    note = folder / NOTE
    return note.read_text(encoding="utf-8").strip() if note.is_file() else ""


def cause(wrong: Exception) -> str:
    """One line. The message of a rank's error is its whole traceback."""
    lines = [line for line in f"{type(wrong).__name__}: {wrong}".splitlines() if line.strip()]
    raised = [line for line in lines[1:] if _RAISED.match(line)]
    return raised[-1] if raised else lines[0]
