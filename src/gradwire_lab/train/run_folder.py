"""Run folders: what a training has left there."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any


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
