"""Live page: the report of a training that runs, written again while its log grows.

The page brings itself up to date from its file, without a server. It is not loaded again, unless the browser allows no
frames. The one that is written last stays as it is.
"""

import os
import time
from pathlib import Path

from gradwire_lab.report.charts.curves import loss_curve
from gradwire_lab.report.load import RunRecord
from gradwire_lab.report.page import Section, bundle, render, section
from gradwire_lab.report.progress import QUIET, progress, quiet_seconds
from gradwire_lab.report.run_groups import Group, Task, task_name, tasks
from gradwire_lab.report.slug import slug

RELOAD = 5  # seconds
SHARE = 0.05  # of one core's time, which writing the page may take where the log is long
_NO_EPOCH = "No epoch has ended yet. The table and the other charts come with the first one."


class LivePage:
    """The file of a page that follows a run.

    Attributes:
        path: Where it is written.
        reload: Seconds after which the page brings itself up to date, and before which it is not written again.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.reload = path, RELOAD
        self._written: tuple[RunRecord, int] | None = None
        self._due = 0.0

    def look(self, run: RunRecord) -> None:
        """Write the page, if the run has changed and the last page has had its time.

        A run that says nothing has changed once a minute, because the page says for how long.
        """
        now, state = time.monotonic(), (run, int(quiet_seconds(run) // QUIET))
        if run.final is not None or now < self._due or state == self._written:
            return
        bundle()  # made once, and not counted as time that every page takes
        began = time.process_time()  # by the clock, a page takes longer on a machine that is busy with the training
        replace_file(self.path, live_page(run, self.reload))
        self._written = state
        self.reload = max(RELOAD, round((time.process_time() - began) / SHARE))
        self._due = now + self.reload

    def close(self, run: RunRecord) -> None:
        """Write the last page."""
        replace_file(self.path, live_page(run, None))


def live_page(run: RunRecord, reload: int | None) -> str:
    """The page as text; without ``reload`` it stays as it is."""
    found = tasks([run])
    # Accuracy against bytes compares runs: of one it would be a single point.
    sections = [section(task, without="metric-over-bytes") for task in found] or [_first_steps(run)]
    return render(run.folder.resolve().name, _subtitle(run, reload), sections, progress(run), reload)


def replace_file(path: Path, text: str) -> None:
    """Write a file whole: who reads it meanwhile reads the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _subtitle(run: RunRecord, reload: int | None) -> str:
    written = f"Written on {time.strftime('%Y-%m-%d at %H:%M:%S %Z')}"
    if run.final is not None:
        return f"{written}. The training has ended."
    if reload is None:
        return f"{written}, before the training ended. This page is no longer updated."
    return f"{written}. This page brings itself up to date every {reload} seconds until the training ends."


def _first_steps(run: RunRecord) -> Section:
    """What there is to see before the first epoch has ended: the loss, by step."""
    name = task_name(run)
    figure = loss_curve(Task(name, run.metric, (Group(run.spec, (run,)),)))
    return Section(slug(name), name, _NO_EPOCH, figures=[] if figure is None else [figure])
