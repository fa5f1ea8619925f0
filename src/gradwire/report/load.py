"""Run folders, read back: what `run.jsonl`, `recipe.toml` and `environment.json` say of a training."""

import json
import math
import re
import shlex
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LOG = "run.jsonl"
CELL = "cell.json"  # what a grid asked of this run, and by which command
DENSE = ("dense", "fp32", "none")  # specs under which nothing is compressed

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Metric:
    """What a task is judged by."""

    name: str
    title: str
    unit: str
    scale: float  # from what the log holds to what a person reads
    larger_is_better: bool

    @property
    def axis(self) -> str:
        return f"{self.title} ({self.unit})" if self.unit else self.title

    def better(self, one: float, other: float) -> bool:
        return one > other if self.larger_is_better else one < other


METRICS = {
    "top1": Metric("top1", "test accuracy", "%", 100, larger_is_better=True),
    "perplexity": Metric("perplexity", "test perplexity", "", 1, larger_is_better=False),
}


@dataclass(frozen=True)
class Run:
    """One run folder.

    Attributes:
        folder: Where it lies.
        start: The record that opens the log.
        steps: A record for each step that was logged, in order, each step once.
        epochs: A record for each epoch, in order, each epoch once.
        final: The closing record; None while the run is unfinished.
        recipe: The resolved recipe.
        recipe_text: The same as the file has it.
        environment: Versions, machine, revision and command, as far as they were noted.
    """

    folder: Path
    start: Record
    steps: tuple[Record, ...]
    epochs: tuple[Record, ...]
    final: Record | None
    recipe: Mapping[str, Any] = field(default_factory=dict)
    recipe_text: str = ""
    environment: Mapping[str, Any] = field(default_factory=dict)

    @property
    def last(self) -> Record:
        """The closing record, or the latest epoch of a run that is under way."""
        return {**(self.epochs[-1] if self.epochs else {}), **(self.final or {})}

    @property
    def name(self) -> str:
        """The recipe's name, which opens the folder's."""
        told = self.start.get("recipe")
        if isinstance(told, list | tuple):
            return "-".join(str(part) for part in told)
        return told if isinstance(told, str) else self.stem

    @property
    def spec(self) -> str:
        return str(self.start.get("spec") or "dense")

    @property
    def world(self) -> int:
        return int(self.start.get("world", 1))

    @property
    def stem(self) -> str:
        """The folder's name without the seed."""
        return re.sub(r"-\d+$", "", self.folder.name)

    @property
    def seed(self) -> int:
        told = self.start.get("seed")
        if told is None:
            ending = re.search(r"-(\d+)$", self.folder.name)
            told = ending[1] if ending else 0
        return int(told)

    @property
    def metric(self) -> Metric:
        name = str(self.last.get("metric", "top1"))
        return METRICS.get(name) or Metric(name, name, "", 1, larger_is_better=True)

    @property
    def command(self) -> str:
        """What was typed, as the environment noted it; otherwise what would repeat the run."""
        noted = self.environment.get("command")
        if isinstance(noted, list) and noted:
            return f"gradwire {shlex.join(str(word) for word in noted[1:] if word != '--resume')}"
        return str(noted or f"gradwire train {self.folder / 'recipe.toml'}")

    def value(self, record: Record) -> float:
        """The metric in a record, in the unit that people read; not a number where the run diverged."""
        told = record.get("value")
        return math.nan if told is None else self.metric.scale * float(told)

    def number(self, key: str) -> float | None:
        """A number of the latest record, if it is there."""
        told = self.last.get(key)
        return None if told is None else float(told)

    @property
    def wire_ratio(self) -> float | None:
        """Bytes that a rank sends and receives in a float32 ring all-reduce, over those of this run."""
        dense, moved = self.number("dense"), (self.number("sent") or 0) + (self.number("received") or 0)
        return 4 * (self.world - 1) / self.world * dense / moved if dense and moved else None


def find(paths: Iterable[Path]) -> list[Path]:
    """Every run folder among or under some paths, each once, in order of name.

    Raises:
        ValueError: A path holds no run.
    """
    found, empty = sort_out(paths)
    if empty:
        raise ValueError(nothing_in(empty))
    return found


def sort_out(paths: Iterable[Path]) -> tuple[list[Path], list[Path]]:
    """The same, and those paths that hold no run: what a training that was refused leaves, for one."""
    found: dict[Path, None] = {}
    empty: list[Path] = []
    for path in paths:
        folder = path.parent if path.name == LOG else path
        here = sorted(log.parent for log in folder.rglob(LOG)) if folder.is_dir() else []
        if not here:
            empty.append(path)
        found.update(dict.fromkeys(here))
    return list(found), empty


def nothing_in(paths: Iterable[Path]) -> str:
    return f"there is no run in {', '.join(map(str, paths))}; a run folder holds a {LOG}"


def load(folder: Path) -> Run:
    """Read one run folder.

    Raises:
        ValueError: The log is damaged otherwise than by an end in mid-line.
    """
    start: Record = {}
    steps: dict[int, Record] = {}
    epochs: dict[float, Record] = {}
    final: Record | None = None
    for record in records(folder / LOG):
        # A resumed run repeats what lies behind its checkpoint, and the later account counts.
        match record.get("event"):
            case "start":
                start = record
            case "step":
                steps[int(record["step"])] = record
            case "epoch":
                epochs[float(record["epoch"])] = record
            case "final":
                final = record
    text = _text(folder / "recipe.toml")
    return Run(
        folder,
        start,
        tuple(steps[step] for step in sorted(steps)),
        tuple(epochs[epoch] for epoch in sorted(epochs)),
        final,
        tomllib.loads(text),
        text,
        _environment(folder),
    )


def records(log: Path) -> list[Record]:
    """The records of a log. A last line without its end is what a killed process leaves: it is passed over."""
    lines = log.read_text().splitlines()
    told: list[Record] = []
    for number, line in enumerate(lines, 1):
        try:
            told.append(json.loads(line))
        except ValueError:
            if number == len(lines):
                break
            raise ValueError(f"line {number} of {log} is no JSON") from None
    return told


def finished(folder: Path) -> bool:
    """Whether a run came to its end."""
    return (folder / LOG).is_file() and any(record.get("event") == "final" for record in records(folder / LOG))


def _environment(folder: Path) -> dict[str, Any]:
    """What the run noted; of a cell of a grid, the command is the grid's."""
    noted: dict[str, Any] = json.loads(_text(folder / "environment.json") or "{}")
    asked = json.loads(_text(folder / CELL) or "{}")
    return noted | ({"command": asked["command"]} if asked.get("command") else {})


def _text(path: Path) -> str:
    return path.read_text() if path.is_file() else ""
