"""Run logs: the records of `run.jsonl`, checked, so that all that follows may trust their types."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

NEEDED = {"step": ("step",), "epoch": ("epoch", "step")}  # numbers of a record, by its event
COUNTS = ("step", "epoch", "steps", "steps_per_epoch", "world", "parameters")  # where they are there
NUMBERS = (  # where they are there; None of what is not finite
    *("hosts", "seed", "seconds"),
    *("loss", "train_loss", "test_loss", "value", "top5", "best", "consensus", "skipped"),
    *("sent", "received", "payload", "dense", "ring", "payload_ratio", "wire_ratio"),
    *("encode_seconds", "wire_seconds", "decode_seconds"),
)
LARGEST = 1e300

REMEDY = "put a whole copy back, or leave that run out"

T = TypeVar("T")
Record = Mapping[str, Any]


def records(log: Path) -> list[Record]:
    """The records of a log. A last line without its end is what a killed process leaves: it is passed over."""
    lines: list[str] = parsed(log, str.splitlines)
    checked: list[Record] = []
    for number, line in enumerate(lines, 1):
        try:
            checked.append(_record(line))
        except (TypeError, ValueError, RecursionError):
            if number == len(lines) and line.startswith("{"):
                break
            raise ValueError(f"line {number} of {log} is not a record in JSON; {REMEDY}") from None
    return checked


def _record(line: str) -> Record:
    """A record whose numbers are numbers.

    Raises:
        ValueError, TypeError: It is none.
    """
    record = dict(json.loads(line))
    if not all(isinstance(record.get(key, {}), dict | None) for key in ("rules", "layers")):
        raise ValueError("an account is not a table")
    needed = NEEDED.get(str(record.get("event")), ())
    rules, layers = record.get("rules") or {}, record.get("layers") or {}
    inside = [number for pair in rules.values() for number in pair] + list(layers.values())
    fields = [record[key] for key in COUNTS if key in record]
    fields += [record[key] for key in NUMBERS if record.get(key) is not None]
    if not all(map(_is_number, (*fields, *(record.get(key) for key in needed), *inside))):
        raise ValueError("a field is not a number")
    if any(len(pair) != 2 for pair in rules.values()) or record.get("world") == 0:
        raise ValueError("a field is out of range")
    if not all(isinstance(word, str) for word in record.get("command") or ()):
        raise ValueError("a command is not a list of words")
    return record


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) < LARGEST


def parsed(path: Path, parse: Callable[[str], T]) -> T:
    """What a file of a run says; one that is not there says nothing."""
    try:
        return parse(path.read_text(encoding="utf-8") if path.is_file() else "")
    except (TypeError, ValueError, RecursionError) as wrong:
        raise ValueError(f"{path} is damaged ({wrong}); {REMEDY}") from None
