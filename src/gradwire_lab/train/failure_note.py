"""Failure note: why a training ended with an error, in one line of its folder, for whoever started it."""

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NOTE = "failure.txt"
_RAISED = re.compile(r"[A-Za-z_][\w.]*: .")  # the line of a traceback that names the error


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
            note.write_text(f"{_cause(wrong)}\n", encoding="utf-8")
        raise


def noted_failure(folder: Path) -> str:
    """The cause that was written there last; empty without one."""
    note = folder / NOTE
    return note.read_text(encoding="utf-8").strip() if note.is_file() else ""


def _cause(wrong: Exception) -> str:
    """One line. The message of a rank's error is its whole traceback."""
    lines = [line for line in f"{type(wrong).__name__}: {wrong}".splitlines() if line.strip()]
    raised = [line for line in lines[1:] if _RAISED.match(line)]
    return raised[-1] if raised else lines[0]
