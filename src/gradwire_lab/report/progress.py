"""How far a training has come, in words: what its terminal and its page show of it."""

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

from gradwire_lab.report.load import LOG, RunRecord
from gradwire_lab.report.machine_load import noted_in
from gradwire_lab.report.numbers import in_bytes, ratio
from gradwire_lab.report.run_log import Record
from gradwire_lab.report.summary import ranks

QUIET = 60.0  # seconds without a record, after which a training may have died


class ProgressLine(NamedTuple):
    """One line: its name, what it says, and the values whose last it says, if there are several."""

    name: str
    text: str
    values: Sequence[float] = ()


def progress(run: RunRecord) -> list[ProgressLine]:
    """Lines of a run, from its name to the skipped steps."""
    latest = latest_record(run)
    step, steps = int(latest.get("step", 0)), int(run.start.get("steps", 0))
    workers = f"{ranks(run)} worker{'s' * (run.ranks != '1')}"
    lines = [
        ProgressLine("run", f"{run.folder}: {run.spec}, {workers}"),
        ProgressLine("step", f"{step:,} of {steps:,}, {_left(run, latest, steps)}"),
        *_learned(run),
        *_sent(latest),
        *_load(run),
        ProgressLine("skipped", _skipped(run, latest)),
    ]
    seconds = quiet_seconds(run)
    if seconds > QUIET:
        text = f"no record for {timedelta(seconds=round(seconds))}: the training may have stopped"
        lines.append(ProgressLine("quiet", text))
    return lines


def latest_record(run: RunRecord) -> Record:
    """All that is known by now: steps are noted more often than epochs, and say less."""
    return {**run.last, **(run.steps[-1] if run.steps and run.final is None else {})}


def quiet_seconds(run: RunRecord) -> float:
    """How long an unfinished run has written nothing; zero for one that has ended."""
    return 0.0 if run.final is not None else max(0.0, time.time() - (run.folder / LOG).stat().st_mtime)


def _learned(run: RunRecord) -> list[ProgressLine]:
    losses = [float(record["loss"]) for record in run.steps if record.get("loss") is not None]
    values = [run.value(record) for record in run.epochs]
    lines = [ProgressLine("loss", f"{losses[-1]:.4f}", losses)] if losses else []
    return lines + ([ProgressLine(run.metric.axis, f"{values[-1]:.2f}", values)] if values else [])


def _sent(latest: Record) -> list[ProgressLine]:
    if not latest.get("sent"):
        return []
    smaller = f"{ratio(latest.get('payload_ratio') or 1)} smaller than float32"
    return [
        ProgressLine("sent", f"{in_bytes(latest['sent'])} by each worker"),
        ProgressLine("payload", smaller),
    ]


def _load(run: RunRecord) -> list[ProgressLine]:
    load = noted_in(run.epochs[-1] if run.epochs else run.start)
    if load is None:
        return []
    return [ProgressLine("machine", f"{load}, busy with other work" if load.busy else str(load))]


def _skipped(run: RunRecord, latest: Record) -> str:
    """Epochs note it, steps do not."""
    if not (run.epochs or run.final):
        return "not known before an epoch has ended"
    skipped = int(latest.get("skipped") or 0)
    return f"{skipped:,} step{'s' * (skipped != 1)}"


def _left(run: RunRecord, latest: Record, steps: int) -> str:
    """How long the rest will take, by the steps of this session."""
    if run.final is not None:
        return "ended"
    if quiet_seconds(run) > QUIET:
        return "not ended"
    done, seconds = (float(latest.get(name) or 0) - float(run.start.get(name) or 0) for name in ("step", "seconds"))
    if done <= 0:
        return "time left is not known yet"
    return f"about {timedelta(seconds=round(seconds / done * (steps - float(latest['step']))))} left"
