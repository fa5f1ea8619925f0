"""Checkpoint: everything a run needs to go on as if nothing had happened.

    RUN/checkpoints/step-120/model.safetensors      parameters, and the batch-norm statistics that evaluation uses
                             optimizer.safetensors  its tensors
                             rank-0.safetensors     a worker's compression memory, own statistics and recurrent states
                             progress.json          all that is no tensor
    RUN/checkpoints/last.json, best.json            which folder each of them is

A folder is complete, and on the disk, before its name is written into last.json or best.json, which happens in one
stroke: whenever a process dies or the power fails, both name a whole checkpoint. Every file has a checksum; those of
older versions, whose JSON had none, are read. No pickle is written or read.
"""

import json
import math
import shutil
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from gradwire.integrations import checksums

State = Mapping[str, Tensor]
MODEL, OPTIMIZER, PROGRESS = "model.safetensors", "optimizer.safetensors", "progress.json"
FORMAT = 2  # of JSON files; the first had no checksum


class Damaged(ValueError):
    """A file of a checkpoint cannot be read; the message names it, and the remedies."""

    def __init__(self, path: Path, why: object) -> None:
        super().__init__(
            f"{path} is damaged ({why}); put a whole copy back, let last.json name another checkpoint, or start "
            "again with --overwrite"
        )


def write_text(path: Path, text: str) -> None:
    """Replace a file in one stroke."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    checksums.publish(partial, path)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """The same for an object, with a checksum."""
    write_text(path, json.dumps({"format": FORMAT, **content, "crc32": _checksum(content)}))


def find(run: Path, which: str) -> Path | None:
    """The folder of the ``last`` or the ``best`` checkpoint of a run, if it has one.

    Raises:
        Damaged: It had one.
    """
    pointer = run / "checkpoints" / f"{which}.json"
    if not pointer.is_file():
        return None
    for _ in range(2):  # a run that is under way may have swept it just now, and named the next
        folder = pointer.parent / str(_json(pointer, "folder")["folder"])
        if (folder / PROGRESS).is_file():
            return folder
    raise Damaged(folder / PROGRESS, "there is no such file")


def progress_of(folder: Path) -> dict[str, Any]:
    """All of a checkpoint that is no tensor."""
    return _json(folder / PROGRESS, "world")


def load_tensors(path: Path) -> dict[str, Tensor]:
    """The inverse of `save_tensors`."""
    try:
        return checksums.read(path)
    except checksums.Unreadable as error:
        raise Damaged(path, error) from None


def inspect(folder: Path) -> None:
    """Refuse a checkpoint with a damaged file before anything else is done.

    Of tensors only the headers are read, which hold the file's length; checksums are compared when a file is loaded.
    """
    progress_of(folder)
    for path in sorted({folder / MODEL, *folder.glob("*.safetensors")}):
        try:
            with safe_open(path, "pt"):
                pass
        except (OSError, SafetensorError) as error:
            raise Damaged(path, error) from None


def open_folder(run: Path, step: int) -> Path:
    """The folder of a new checkpoint."""
    folder = run / "checkpoints" / f"step-{step}"
    folder.mkdir(parents=True, exist_ok=True)
    for parent in folder.parents[:3]:
        checksums.sync(parent)  # or a power cut may leave last.json, and not the folder that it names
    return folder


def publish(folder: Path, best: bool) -> None:
    """Name a complete checkpoint as the last one, and perhaps as the best, and remove those that are neither."""
    for which in ("best", "last") if best else ("last",):
        write_json(folder.parent / f"{which}.json", {"folder": folder.name})
    _sweep(folder.parents[1], _step_of(folder))


def save_tensors(state: State, path: Path) -> None:
    """A flat dictionary of tensors, as one file."""
    checksums.write({name: x.detach().cpu().contiguous().clone() for name, x in state.items()}, path)


def save_optimizer(optimizer: torch.optim.Optimizer, path: Path) -> dict[str, Any]:
    """Write the tensors of an optimizer's state; what else there is comes back, for JSON."""
    state = optimizer.state_dict()
    tensors, plain = {}, {}
    for index, entries in state["state"].items():
        for name, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"{index}/{name}"] = value
            else:
                plain[f"{index}/{name}"] = value
    save_tensors(tensors, path)
    return {"plain": plain, "groups": state["param_groups"]}


def load_optimizer(optimizer: torch.optim.Optimizer, path: Path, rest: Mapping[str, Any]) -> None:
    """The inverse of `save_optimizer`."""
    state: dict[int, dict[str, Any]] = {}
    for key, value in {**load_tensors(path), **rest["plain"]}.items():
        index, _, name = key.partition("/")
        state.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": rest["groups"]})


def rank_states(folder: Path, ranks: Sequence[int]) -> list[dict[str, Tensor]]:
    """The states of some ranks."""
    return [load_tensors(folder / f"rank-{rank}.safetensors") for rank in ranks]


def load_model(model: nn.Module, name: str, folder: Path) -> None:
    """Give a model, which a recipe calls ``name``, the weights of a checkpoint."""
    try:
        model.load_state_dict(load_tensors(folder / MODEL))
    except RuntimeError as error:
        why = " ".join(str(error).split())
        raise ValueError(
            f"{folder / MODEL} holds another model than {name} makes now ({why}); name the model and the "
            "options that it was trained with"
        ) from None


def part(state: State, prefix: str) -> dict[str, Tensor]:
    """The entries under a prefix, without it."""
    return {name.removeprefix(prefix): x for name, x in state.items() if name.startswith(prefix)}


def prefixed(state: State, prefix: str) -> dict[str, Tensor]:
    return {prefix + name: x for name, x in state.items()}


def clear(run: Path) -> None:
    """Remove all checkpoints of a run."""
    shutil.rmtree(run / "checkpoints", ignore_errors=True)


def _sweep(run: Path, before: float) -> None:
    """Remove checkpoints that are neither last nor best; none, where that is not known.

    Workers that are a step ahead may have begun a later one, which has no `PROGRESS` yet.
    """
    try:
        named = {find(run, "last"), find(run, "best")}
    except Damaged:
        return
    for folder in (run / "checkpoints").glob("step-*"):
        if folder not in named and ((folder / PROGRESS).is_file() or _step_of(folder) < before):
            shutil.rmtree(folder, ignore_errors=True)  # it may be a file of others


def _step_of(folder: Path) -> float:
    number = folder.name.removeprefix("step-")
    return int(number) if number.isdigit() else math.inf


def _json(path: Path, key: str) -> dict[str, Any]:
    """An object with a key that it must have. One mark of the format that is left asks for the other."""
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise Damaged(path, error) from None
    if not isinstance(read, dict) or key not in read:
        raise Damaged(path, f"it has no {key!r}")
    marks = {mark: read.pop(mark) for mark in ("format", "crc32") if mark in read}
    if marks and marks != {"format": FORMAT, "crc32": _checksum(read)}:
        raise Damaged(path, "its checksum is wrong, so some of its bytes have changed")
    return read


def _checksum(content: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(content).encode()):08x}"
