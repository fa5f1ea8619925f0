"""Versions of a user's own files: runs of a file that has changed since are not compared with each other."""

import hashlib
import json
from collections.abc import Sequence

from gradwire_lab.report.load import RunRecord

UNKNOWN = "unknown"  # of runs that did not note what their files held


def fingerprint(value: object) -> str:
    """Eight letters that stand for plain data."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]


def by_version(runs: Sequence[RunRecord]) -> dict[str, list[RunRecord]]:
    """Runs of one task by what its files held, the version that was trained last first.

    A file that only some runs depend on, such as that of a codec, belongs to a spec and not to the task.
    """
    noted = [set(run.files or ()) for run in runs if run.files is not None or not run.own_code]
    common = set.intersection(*noted) if noted else set()
    found: dict[str, list[RunRecord]] = {}
    for run in runs:
        found.setdefault(_version(run, common), []).append(run)
    if len(found) == 1:
        return found
    return dict(sorted(found.items(), key=lambda item: max(run.began for run in item[1]), reverse=True))


def spec_files(run: RunRecord) -> str:
    """Stands for all files that a run depends on: two versions of a codec are two ways of doing a task."""
    files = run.files if run.asked_files is None else run.asked_files
    return fingerprint(dict(files)) if files else ""


def _version(run: RunRecord, common: set[str]) -> str:
    if not common:
        return ""
    return UNKNOWN if run.files is None else fingerprint({name: run.files[name] for name in common})
