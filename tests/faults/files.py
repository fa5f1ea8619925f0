"""Damaged files: run folders, checkpoints, saved states, recipes and meeting folders.

A file with a checksum is read as it was, or refused by name. Text without one may say something else; then the command
works or ends in a sentence.
"""

import random
import shutil
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from typer.testing import CliRunner

import fixtures
import gradwire
from faults.campaign import Campaign
from gradwire.comm.rendezvous import FolderRendezvous
from gradwire_lab.cli.main import app
from gradwire_lab.train import checkpoint, recipe_files
from run_folders import write_run
from training_fixtures import recipe_of, train

Damage = Callable[[Path, random.Random], None]


def change_bytes(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(draw.choice((1, 1, 1, 2, 16))):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def cut_short(path: Path, draw: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: draw.randrange(len(data))])


def make_empty(path: Path, draw: random.Random) -> None:
    path.write_bytes(b"")


def zero_block(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    at = draw.randrange(len(data))
    n = min(len(data) - at, draw.choice((8, 64, 512)))
    data[at : at + n] = bytes(n)
    path.write_bytes(data)


def append(path: Path, draw: random.Random) -> None:
    path.write_bytes(path.read_bytes() + draw.choice((b"\0", b"\n{", b"}", draw.randbytes(20), b"[" * 5000)))


def drop_block(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    at = draw.randrange(len(data))
    del data[at : at + draw.choice((1, 4, 30))]
    path.write_bytes(data)


def double_block(path: Path, draw: random.Random) -> None:
    data = path.read_bytes()
    at = draw.randrange(len(data))
    path.write_bytes(data[:at] + data[at : at + 40] + data[at:])


def fill_with_noise(path: Path, draw: random.Random) -> None:
    path.write_bytes(draw.randbytes(draw.choice((1, 50, path.stat().st_size))))


def nest_deep(path: Path, draw: random.Random) -> None:
    path.write_text(draw.choice(("[", '{"a":', "(")) * 50_000)


def set_number(path: Path, draw: random.Random) -> None:
    """A number, where there is one, becomes another."""
    data = path.read_bytes()
    places = [at for at, byte in enumerate(data) if chr(byte).isdigit()]
    if places:
        at = draw.choice(places)
        odd = draw.choice((b"-1", b"1e999", b"99999999999999999999", b"NaN", b"null", b'"x"', b"[]", b""))
        path.write_bytes(data[:at] + odd + data[at + 1 :])


def remove(path: Path, draw: random.Random) -> None:
    path.unlink()


def make_folder(path: Path, draw: random.Random) -> None:
    path.unlink()
    path.mkdir()


def link_to_itself(path: Path, draw: random.Random) -> None:
    path.unlink()
    path.symlink_to(path)


DAMAGES: dict[str, Damage] = {
    "bits flipped": change_bytes,
    "cut short": cut_short,
    "empty": make_empty,
    "a block of zeros": zero_block,
    "appended": append,
    "a block missing": drop_block,
    "a block twice": double_block,
    "noise": fill_with_noise,
    "deeply nested": nest_deep,
    "a number changed": set_number,
    "removed": remove,
    "a folder instead": make_folder,
    "a link to itself": link_to_itself,
}


class Files:
    """Whole files of each family, and what reading them must give."""

    def __init__(self, root: Path) -> None:
        self.root = root
        train(recipe_of("digits", "sync.spec=topk(0.05)", "train.epochs=1"), 2, root / "run")
        last = checkpoint.find(root / "run", "last")
        assert last is not None
        self.last = last.relative_to(root)
        write_run(root / "log", epochs=2)
        (root / "recipe.toml").write_text(recipe_files.dumps(recipe_of("digits")))
        nets, workers = fixtures.replicas(2, "topk(0.1)")
        fixtures.train_steps(nets, workers, range(3))
        for wire in workers.wires:
            gradwire.save(wire, root / "wire")
        self.wires = workers.wires
        self.states = [wire.state_dict() for wire in workers.wires]
        self.progress = checkpoint.progress_of(last)
        self.tensors = {path.name: checkpoint.load_tensors(path) for path in last.glob("*.safetensors")}
        FolderRendezvous(root / "meeting").write(1, ("127.0.0.1", 4711))
        self.targets = self._targets()

    def _targets(self) -> dict[str, tuple[list[Path], Callable[[Path], str | None]]]:
        """By family: files, and what reads them; it returns what is wrong."""
        last, log = self.last, next((self.root / "log").iterdir()).relative_to(self.root)
        tensors = [last / name for name in sorted(self.tensors)]
        return {
            "progress of a checkpoint": ([last / "progress.json"], self._progress),
            "pointer to a checkpoint": ([Path("run/checkpoints/last.json")], self._pointer),
            "tensors of a checkpoint": (tensors, self._tensors),
            "state of a wire": ([Path("wire/wire-0.safetensors"), Path("wire/wire-1.safetensors")], self._wire),
            "log of a run": ([log / "run.jsonl", log / "environment.json", log / "recipe.toml"], self._report),
            "recipe": ([Path("recipe.toml")], self._recipe),
            "run to evaluate": ([Path("run/recipe.toml"), *tensors[:1], last / "progress.json"], self._evaluate),
            "meeting folder": ([p.relative_to(self.root) for p in (self.root / "meeting").iterdir()], self._meeting),
        }

    def _progress(self, root: Path) -> str | None:
        return _refused_or(lambda: checkpoint.progress_of(root / self.last) == self.progress, checkpoint.Damaged)

    def _pointer(self, root: Path) -> str | None:
        def right() -> bool:
            folder = checkpoint.find(root / "run", "last")
            return folder is None or folder == root / self.last

        return _refused_or(right, checkpoint.Damaged)

    def _tensors(self, root: Path) -> str | None:
        def right() -> bool:
            names = self.tensors
            return all(_same(checkpoint.load_tensors(root / self.last / name), names[name]) for name in names)

        return _refused_or(right, checkpoint.Damaged)

    def _wire(self, root: Path) -> str | None:
        def right() -> bool:
            states = [gradwire.integrations.checkpoint._read(root / "wire", rank) for rank in range(2)]
            return all(_same(one, other) for one, other in zip(states, self.states, strict=True))

        return _refused_or(right, ValueError)

    def _meeting(self, root: Path) -> str | None:
        FolderRendezvous(root / "meeting").read(1)
        return None

    def _report(self, root: Path) -> str | None:
        return _sentence("report", str(root / "log"), "--markdown", "-")

    def _recipe(self, root: Path) -> str | None:
        return _sentence("plan", str(root / "recipe.toml"))

    def _evaluate(self, root: Path) -> str | None:
        return _sentence("evaluate", str(root / "run"))


def _same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def _refused_or(right: Callable[[], bool], error: type[Exception]) -> str | None:
    try:
        return None if right() else "it was read with other contents"
    except error:
        return None


def _sentence(*words: str) -> str | None:
    done = CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    if "Traceback" in done.output:
        return "the command shows a traceback"
    return None if done.exit_code == 0 or done.stderr.strip() else f"exit status {done.exit_code} without a word"


def run(campaign: Campaign) -> None:
    torch.set_num_threads(1)
    draw = campaign.random
    with tempfile.TemporaryDirectory() as folder:
        files, copy = Files(Path(folder, "whole")), Path(folder, "damaged")
        while campaign.going():
            family = draw.choice(list(files.targets))
            paths, read = files.targets[family]
            path, damage = draw.choice(paths), draw.choice(list(DAMAGES))
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(files.root, copy)
            DAMAGES[damage](copy / path, draw)
            campaign.made(f"{family}: {damage}")
            where = f"{family}, {path.name}: {damage}"
            try:
                wrong = read(copy)
            except Exception:
                campaign.fail("traceback", f"{where}: {traceback.format_exc(limit=-4)}")
                continue
            campaign.expect(wrong is None, "wrong result", f"{where}: {wrong}")
