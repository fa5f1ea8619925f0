"""One cell of a grid, trained by the command that a person would type."""

import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from gradwire.report.load import LOG
from gradwire.train.compare import OutOfTime

PATIENCE_SECONDS = 60.0  # for an orderly end, once asked to stop
REFUSED = 2  # the exit code of a command that cannot be


@dataclass(frozen=True)
class TrainCommand:
    """Runs ``gradwire train`` in a process of its own, and stops it when the time is up.

    Attributes:
        options: Further options of the command.
        deadline: On the monotonic clock; None never comes.
    """

    options: tuple[str, ...] = ()
    deadline: float | None = None

    def __call__(self, recipes: tuple[str, ...], overrides: tuple[str, ...], folder: Path) -> None:
        # In a group of its own: Ctrl-C reaches us alone, and we pass it on once.
        process = subprocess.Popen(self.line(recipes, overrides, folder), process_group=0)
        try:
            code = process.wait(self._left())
        except subprocess.TimeoutExpired:
            _stop(process)
            raise OutOfTime from None
        except BaseException:
            _stop(process)
            raise
        if code == REFUSED:
            raise ValueError("gradwire train refused this; see above")
        if code:
            raise RuntimeError(f"gradwire train ended with code {code}")

    def line(self, recipes: tuple[str, ...], overrides: tuple[str, ...], folder: Path) -> list[str]:
        """The command, which resumes a run that has begun."""
        start = [sys.executable, "-c", "from gradwire.cli.main import app; app()", "train"]
        sets = [part for override in overrides for part in ("--set", override)]
        resume = ["--resume"] if (folder / LOG).is_file() else []
        return [*start, *recipes, *sets, "--folder", str(folder), *resume, *self.options]

    def _left(self) -> float | None:
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """Ask for an orderly end, which training takes as Ctrl-C; insist only after a while."""
    for signal_ in (signal.SIGTERM, signal.SIGKILL):
        process.send_signal(signal_)
        try:
            process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            continue
        return
