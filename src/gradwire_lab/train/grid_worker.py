"""One cell of a grid, trained by the command `gradwire train`."""

import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from gradwire_lab.report.load import LOG
from gradwire_lab.train.compare import OutOfTime
from gradwire_lab.train.run_folder import NOTE, noted_failure

PATIENCE_SECONDS = 60.0  # for an orderly end, once asked to stop
REFUSED = 2  # the exit code of a command that cannot be
CONSOLE = "console.txt"  # the output of a cell that does not run alone


@dataclass(frozen=True)
class TrainCommand:
    """Runs ``gradwire train`` in a process of its own, and stops it when the time is up.

    Attributes:
        options: Further options of the command.
        deadline: On the monotonic clock; None never comes.
        quiet: Whether a cell's console is a file in its folder, as befits one of several at once.
    """

    options: tuple[str, ...] = ()
    deadline: float | None = None
    quiet: bool = False
    _live: "set[subprocess.Popen[bytes]]" = field(default_factory=set, compare=False, repr=False)

    def __call__(self, recipes: tuple[str, ...], overrides: tuple[str, ...], folder: Path) -> None:
        (folder / NOTE).unlink(missing_ok=True)
        with (folder / CONSOLE).open("ab") if self.quiet else nullcontext() as console:
            # In a group of its own: Ctrl-C reaches us alone, and we pass it on once.
            line = self.line(recipes, overrides, folder)
            process = subprocess.Popen(line, process_group=0, stdout=console, stderr=console and subprocess.STDOUT)
        self._live.add(process)
        try:
            code = process.wait(None if self.deadline is None else max(0.0, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            _stop(process)
            raise OutOfTime from None
        finally:
            self._live.discard(process)
        if code == REFUSED:
            raise ValueError("gradwire train refused this; see above")
        if code:
            where = f"; see {folder / CONSOLE}" if self.quiet else ""
            raise RuntimeError(f"{noted_failure(folder) or f'gradwire train ended with code {code}'}{where}")

    def stop(self) -> None:
        for process in list(self._live):
            _stop(process)

    def line(self, recipes: tuple[str, ...], overrides: tuple[str, ...], folder: Path) -> list[str]:
        """The command, which resumes a run that has begun."""
        watched = f"from gradwire_lab.parent_watch import end_with_parent; end_with_parent({os.getpid()})"
        start = [sys.executable, "-c", f"{watched}; from gradwire_lab.cli.main import app; app()", "train"]
        sets = [part for override in overrides for part in ("--set", override)]
        resume = ["--resume"] if (folder / LOG).is_file() else []
        return [*start, *recipes, *sets, "--folder", str(folder), *resume, *self.options]


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """Ask for an orderly end, which training takes as Ctrl-C; insist only after a while."""
    for signal_ in (signal.SIGTERM, signal.SIGKILL):
        process.send_signal(signal_)
        try:
            process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            continue
        return
