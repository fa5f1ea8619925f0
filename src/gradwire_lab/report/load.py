"""Run folders, read back: what `run.jsonl`, `recipe.toml` and `environment.json` say of a training."""

import json
import math
import re
import shlex
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from gradwire_lab.report.run_log import Record, parsed, records

LOG = "run.jsonl"
CELL = "cell.json"  # what a grid asked of this run, and by which command
DENSE = ("dense", "fp32", "none")  # specs under which nothing is compressed


@dataclass(frozen=True)
class Metric:
    """What a task is judged by."""

    name: str
    title: str
    unit: str
    scale: float  # from what the log holds to what a person reads
    larger_is_better: bool
    least: float = -math.inf  # of what is possible
    most: float = math.inf

    @property
    def axis(self) -> str:
        return f"{self.title} ({self.unit})" if self.unit else self.title


METRICS = {
    "top1": Metric("top1", "test accuracy", "%", 100, larger_is_better=True, least=0, most=100),
    "perplexity": Metric("perplexity", "test perplexity", "", 1, larger_is_better=False, least=1),
}


@dataclass(frozen=True)
class RunRecord:
    """One run folder.

    Attributes:
        folder: Where it lies.
        start: The record that opened the latest session.
        steps: A record for each step that was logged, in order, each step once.
        epochs: A record for each epoch, in order, each epoch once.
        final: The closing record; None while the run is unfinished.
        recipe: The resolved recipe.
        recipe_text: The same as the file has it.
        environment: Versions, machine, revision and command, as far as they were noted.
        starts: The records that opened each session of which something is left, in order.
        asked_files: Hashes of the user's own files that a grid noted for this run; None where none did.
    """

    folder: Path
    start: Record
    steps: tuple[Record, ...]
    epochs: tuple[Record, ...]
    final: Record | None
    recipe: Mapping[str, Any] = field(default_factory=dict)
    recipe_text: str = ""
    environment: Mapping[str, Any] = field(default_factory=dict)
    starts: tuple[Record, ...] = ()
    asked_files: Mapping[str, str] | None = None

    @property
    def last(self) -> Record:
        """The closing record, or the latest epoch of a run that is under way."""
        return {**(self.epochs[-1] if self.epochs else {}), **(self.final or {})}

    @property
    def name(self) -> str:
        """The recipe's name, which opens the folder's."""
        recipe = self.start.get("recipe")
        if isinstance(recipe, list | tuple):
            return "-".join(map(str, recipe))
        return recipe if isinstance(recipe, str) else self.stem

    @property
    def spec(self) -> str:
        return str(self.start.get("spec") or "dense")

    @property
    def world(self) -> int:
        return int(self.start.get("world", 1))

    @property
    def ranks(self) -> str:
        """How many, in the order of the starts."""
        counts = [str(start.get("world", 1)) for start in self.starts or (self.start,)]
        return ", then ".join(count for count, _ in groupby(counts))

    @property
    def stem(self) -> str:
        """The folder's name without the seed."""
        return re.sub(r"-\d+$", "", self.folder.name)

    @property
    def files(self) -> Mapping[str, str] | None:
        """Hashes of the user's own Python files that the run depends on; None where it did not note them."""
        noted = self.environment.get("files", self.asked_files)
        return {name: str(noted[name]) for name in noted if name.endswith(".py")} if isinstance(noted, dict) else None

    @property
    def own_code(self) -> bool:
        """Whether its model or data come from a file of the user's own."""
        return any(".py:" in str(self.recipe.get(table, {}).get("name", "")) for table in ("data", "model"))

    @property
    def began(self) -> float:
        """When it was trained, in seconds since 1970; where it did not note that, when its log was last written."""
        return float(self.environment.get("began") or (self.folder / LOG).stat().st_mtime)

    @property
    def seed(self) -> int:
        if (seed := self.start.get("seed")) is not None:
            return int(seed)
        ending = re.search(r"-(\d+)$", self.folder.name)
        return int(ending[1]) if ending else 0

    @property
    def metric(self) -> Metric:
        name = str(self.last.get("metric", "top1"))
        return METRICS.get(name) or Metric(name, name, "", 1, larger_is_better=True)

    @property
    def command(self) -> str:
        """What was typed, in all sessions; otherwise what would repeat the run."""
        noted = self.environment.get("command")
        if noted and not isinstance(noted, list):
            return str(noted)
        typed = [start["command"] for start in self.starts if start.get("command")]
        typed = typed or ([noted] if noted else [])
        if not typed:
            return f"gradwire train {self.folder / 'recipe.toml'}"
        missing = len(self.starts) - len(typed)
        return _lines(typed) + (f"  # {missing} of {len(self.starts)} sessions noted none" if missing > 0 else "")

    @property
    def diverged(self) -> bool:
        """Whether its metric says nothing: its loss is not finite, or most of its steps were skipped."""
        lost = any(self.last.get(key, 0.0) is None for key in ("value", "train_loss", "test_loss"))
        skipped, steps = self.number("skipped") or 0.0, self.number("step") or 0.0
        return lost or "diverged" in self.last or 2 * skipped > steps

    def value(self, record: Record) -> float:
        """The metric in a record, in the unit that people read; not a number where the run diverged."""
        value = record.get("value")
        return math.nan if value is None else self.metric.scale * float(value)

    def number(self, key: str) -> float | None:
        """A number of the latest record, if it is there."""
        value = self.last.get(key)
        return None if value is None else float(value)

    @property
    def wire_ratio(self) -> float | None:
        """Bytes that a rank sends and receives in a float32 ring all-reduce, over those of this run."""
        dense, moved = self.number("dense"), (self.number("sent") or 0) + (self.number("received") or 0)
        if not (dense and moved):
            return None
        parties, ring = self.number("hosts") or self.world, self.number("ring")
        # Older logs do not hold the ring, and all their steps are taken as made by as many as the last.
        return 2 * (2 * (parties - 1) / parties * dense if ring is None else ring) / moved


def find(paths: Iterable[Path]) -> tuple[list[Path], list[Path]]:
    """Every run folder among or under some paths, each once, in order of name; and the paths that hold none.

    Those are what a training that was refused leaves, for one.
    """
    found: dict[Path, None] = {}
    empty: list[Path] = []
    for path in paths:
        folder = path.parent if path.name == LOG else path
        here = sorted(log.parent for log in folder.rglob(LOG)) if folder.is_dir() else []
        if not here:
            empty.append(path)
        found.update(dict.fromkeys(here))
    return list(found), empty


def load(folder: Path) -> RunRecord:
    """Read one run folder.

    Raises:
        ValueError: A file is damaged, the log otherwise than by an end in mid-line.
    """
    opened: list[Record] = []
    steps: dict[int, Record] = {}
    epochs: dict[float, Record] = {}
    final: Record | None = None
    for record in records(folder / LOG):
        # A resumed run repeats what lies behind its checkpoint, and the later account counts.
        match record.get("event"):
            case "start":
                opened.append(record)
            case "step":
                steps[int(record["step"])] = record
            case "epoch":
                epochs[float(record["epoch"])] = record
            case "final":
                final = record
    text = parsed(folder / "recipe.toml", str)
    end = max((*epochs, float((final or {}).get("epoch", 0.0))))
    # A session that began at the run's end has added nothing.
    began = [float(start.get("step", 0)) / float(start.get("steps_per_epoch") or 1) for start in opened]
    starts = tuple(start for start, when in zip(opened, began, strict=True) if when < end) or tuple(opened[-1:])
    return RunRecord(
        folder,
        starts[-1] if starts else {},
        tuple(steps[step] for step in sorted(steps)),
        tuple(epochs[epoch] for epoch in sorted(epochs)),
        final,
        parsed(folder / "recipe.toml", _tables),
        text,
        _environment(folder),
        starts,
        parsed(folder / CELL, _object).get("files"),
    )


def finished(folder: Path) -> bool:
    """Whether a run came to its end."""
    return (folder / LOG).is_file() and any(record.get("event") == "final" for record in records(folder / LOG))


def _lines(typed: Sequence[Sequence[str]]) -> str:
    """Commands that one would type again; those that only went on with the one before are left out."""
    commands: list[str] = []
    for words, _ in groupby([word for word in command[1:] if word != "--resume"] for command in typed):
        commands.append(f"gradwire {shlex.join([*words, *(['--resume'] if commands else [])])}")
    return " && ".join(commands)


def _environment(folder: Path) -> dict[str, Any]:
    """What the run noted; of a cell of a grid, the command is the grid's."""
    noted, asked = (parsed(folder / name, _object) for name in ("environment.json", CELL))
    return noted | ({"command": asked["command"]} if asked.get("command") else {})


def _object(text: str) -> dict[str, Any]:
    content = dict(json.loads(text or "{}"))
    command = content.get("command")
    if not isinstance(command, list | str | None) or not all(isinstance(word, str) for word in command or ()):
        raise ValueError("its command is not a list of words")
    return content


def _tables(text: str) -> dict[str, Any]:
    tables = tomllib.loads(text)
    if not all(isinstance(table, dict) for table in tables.values()):
        raise ValueError("it has values outside of tables")
    return tables
