"""Disks that are full: a training on a small tmpfs ends, or stops with a sentence; with room it goes on from there."""

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from typer.testing import CliRunner

import fixtures
from faults.campaign import Campaign
from gradwire_lab.cli.main import app
from training_fixtures import DIGITS, saved

SMALL = [word for override in (*DIGITS, "train.save_every=3") for word in ("--set", override)]
SPECS = ("topk(0.05)", "dgc(0.05)", "int8")
MOST_KIB = 400


class CannotMount(RuntimeError):
    """This process may not mount a file system."""


@contextmanager
def small_disk(folder: Path, kib: int) -> Iterator[None]:
    folder.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={max(4, kib) // 4 * 4}k", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode:
        raise CannotMount(done.stderr)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)  # a reader may still map a file


def command(folder: Path, spec: str, *more: str) -> tuple[int, str]:
    """The exit status, and what was printed."""
    words = ["train", "digits", "--in-process", "2", "--folder", str(folder), "--set", f"sync.spec={spec}", *SMALL]
    done = CliRunner().invoke(app, [*words, *more], env={"COLUMNS": "200"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        return -1, f"{done.exception!r} {done.output}"
    return done.exit_code, done.output


def run(campaign: Campaign) -> None:
    torch.set_num_threads(1)
    draw = campaign.random
    with tempfile.TemporaryDirectory() as root:
        whole, disk = Path(root, "whole"), Path(root, "disk")
        ends = {}
        for spec in SPECS:
            status, text = command(whole / spec, spec)
            assert status == 0, text
            ends[spec] = saved(whole / spec)
        while campaign.going():
            spec, kib = draw.choice(SPECS), draw.randrange(4, MOST_KIB)
            with small_disk(disk, kib):
                status, text = command(disk / "run", spec)
                where = f"{spec} on {kib} KiB"
                campaign.made("it fitted" if status == 0 else "no space left")
                campaign.expect(status in (0, 1, 2), "traceback", f"{where}: {text[-2000:]}")
                campaign.expect("Traceback" not in text, "traceback", f"{where}: {text[-2000:]}")
                subprocess.run(["mount", "-o", "remount,size=16m", str(disk)], check=True)
                status, text = command(disk / "run", spec, "--resume")
                if campaign.failures or status:
                    campaign.expect(status == 0, "traceback", f"{where}, then with room: {text[-2000:]}")
                    continue
                same = fixtures.same(saved(disk / "run"), ends[spec])
                campaign.expect(same, "wrong result", f"{where}: the resumed training ends elsewhere")
