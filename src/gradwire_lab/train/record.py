"""Record: the files that a run leaves behind for people and programs.

run.jsonl         one JSON object a line: start, step, epoch, final; and each decision of sync.spec = "auto"
results.csv       one line an epoch
recipe.toml       the recipe, resolved
environment.json  versions, device, git revision, command line, hashes of the user's own files
failure.txt       why the last session ended with an error, if it did
events.out.*      TensorBoard, where it is installed
wandb-run         the run's name at Weights & Biases, where WANDB_PROJECT is set
"""

import csv
import importlib
import io
import json
import math
import os
import platform
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from gradwire.version import VERSION, WIRE_FORMAT
from gradwire_lab.train.checkpoint import write_text
from gradwire_lab.train.recipe import Recipe
from gradwire_lab.train.recipe_files import dumps
from gradwire_lab.train.run_folder import read
from gradwire_lab.train.user_files import hashes, named_files

_HERE = Path(__file__).resolve().parent
CURVES = ("train_loss", "test_loss", "valid_loss", "value", "top5", "sent", "payload_ratio", "wire_ratio")


class Records:
    """The open files of one session; a process that does not write opens none."""

    def __init__(self, folder: Path, epoch: float, writes: bool) -> None:
        self.folder = folder
        self._file = None
        self._board: Any = None
        self._wandb: Any = None
        if writes:
            wandb = _find_wandb()  # or an error, before anything is written
            step = self._truncate(epoch)
            self._file = (folder / "run.jsonl").open("a", encoding="utf-8")
            self._board = _tensorboard(folder, step)
            self._wandb = None if wandb is None else _begin(wandb, folder, step)

    def __enter__(self) -> "Records":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for open_file in filter(None, (self._file, self._board)):
            open_file.close()
        if self._wandb is not None:
            self._wandb.finish(exit_code=0 if error is None else 1)

    def write(self, record: dict[str, Any]) -> None:
        assert self._file is not None
        self._file.write(json.dumps(_plain(record)) + "\n")
        self._file.flush()
        if record["event"] == "epoch":
            os.fsync(self._file.fileno())
            write_csv(self.folder)
        curves = {name: record[name] for name in (*CURVES, "loss", "lr") if record.get(name) is not None}
        if record["event"] in ("step", "epoch"):
            self._draw(curves, record["step"], record.get("rounds"))

    def _draw(self, curves: dict[str, float], step: int, rounds: int | None) -> None:
        """By step; after local steps, also by round, under ``by_round/``."""
        if self._board is not None:
            try:
                for name, value in curves.items():
                    self._board.add_scalar(name, value, step)
                    if rounds:
                        self._board.add_scalar(f"by_round/{name}", value, rounds)
            except OSError as wrong:  # of its thread, which does not name the file
                raise OSError(wrong.errno, wrong.strerror, str(self.folder / "events.out")) from None
        if self._wandb is not None:
            self._wandb.log(curves, step=step)

    def _truncate(self, epoch: float) -> int:
        """Remove what was written after the checkpoint that training goes on from; the last step that is left."""
        left = [record for record in read(self.folder) if epoch and _precedes(record, epoch)]
        write_text(self.folder / "run.jsonl", "".join(json.dumps(record) + "\n" for record in left))
        return max((record["step"] for record in left), default=0)


def _precedes(record: dict[str, Any], epoch: float) -> bool:
    """Whether a record was written up to an epoch; of a session's start, whether it began before."""
    if record["event"] == "start":
        return bool(record["step"] / record["steps_per_epoch"] < epoch - 1e-4)
    return bool(record["event"] != "final" and record.get("epoch", 0.0) <= epoch + 1e-4)  # written with four digits


def append_line(path: Path | None, row: Mapping[str, Any]) -> None:
    """Write one more line of JSON, and not behind one that was cut short; nowhere if there is no path."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        cut = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")
        with path.open("a", encoding="utf-8") as file:
            file.write("\n" * cut + json.dumps(row) + "\n")


def write_csv(folder: Path) -> None:
    """results.csv, from the epochs of run.jsonl."""
    rows = [record for record in read(folder) if record["event"] == "epoch"]
    names = [name for name in dict.fromkeys(key for row in rows for key in row) if name != "event"]
    text = io.StringIO(newline="")
    sheet = csv.DictWriter(text, names, extrasaction="ignore")
    sheet.writeheader()
    sheet.writerows(rows)
    write_text(folder / "results.csv", text.getvalue())


def open_folder(folder: Path, recipe: Recipe) -> None:
    """Make a run's folder, with its recipe and where it runs."""
    files = hashes(named_files(recipe))
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "recipe.toml", dumps(recipe))
    write_text(
        folder / "environment.json", json.dumps(environment() | {"files": files, "began": time.time()}, indent=2)
    )


def environment() -> dict[str, Any]:
    """What else may have made a difference."""
    return {
        "gradwire": VERSION,
        "wire_format": WIRE_FORMAT,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu",
        "cpus": os.cpu_count(),
        "git": _revision(),
        "command": sys.argv,
    }


def _revision(folder: Path = _HERE) -> str | None:
    """The revision of the code that runs, if it runs from a checkout."""

    def git(*words: str) -> str:
        # Without a lock on the index: a git that is killed would leave it behind.
        command = ["git", "--no-optional-locks", "-C", str(folder), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("describe", "--always", "--abbrev=40") + ("-dirty" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _plain(record: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity, and no NaN."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}


def _tensorboard(folder: Path, step: int) -> Any:
    """A writer whose curves go on after a step: what an earlier session drew beyond it is not shown."""
    try:
        writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
    except ImportError:
        return None
    threading.excepthook = _without_disk_errors(threading.excepthook)
    return writer(str(folder), purge_step=step + 1)


def _without_disk_errors(show: Callable[[Any], object]) -> Callable[[Any], object]:
    """A hook that leaves out what TensorBoard's thread cannot write: the next call of its writer raises that."""

    def hook(failed: Any) -> None:
        if not (isinstance(failed.exc_value, OSError) and "tensorboard" in type(failed.thread).__module__):
            show(failed)

    return show if getattr(show, "__qualname__", "") == hook.__qualname__ else hook


def _find_wandb() -> Any:
    """Weights & Biases, if WANDB_PROJECT is set."""
    if not os.environ.get("WANDB_PROJECT"):
        return None
    try:
        return importlib.import_module("wandb")
    except ImportError:
        raise ValueError("WANDB_PROJECT is set, but wandb is not installed: pip install wandb") from None


def _begin(wandb: Any, folder: Path, step: int) -> Any:
    """One run there for all sessions of a run here."""
    project = os.environ["WANDB_PROJECT"]
    name = folder / "wandb-run"
    if not step or not name.is_file():
        write_text(name, uuid.uuid4().hex)
    return wandb.init(project=project, name=folder.name, dir=str(folder), id=name.read_text(), resume="allow")
