"""Limits of the operating system: `train` with few descriptors, or with short files, ends, or stops with a sentence.

Without the limit, `--resume` ends with the bits of a run without a fault, whatever the limited command left.
"""

import subprocess
import tempfile
from functools import partial
from pathlib import Path
from resource import RLIMIT_FSIZE, RLIMIT_NOFILE, setrlimit

import torch

import fixtures
from faults.campaign import Campaign
from faults.processes import COMMAND
from training_fixtures import DIGITS, saved

SPECS = ("topk(0.05)", "dgc(0.05)")
WORKERS = (("--in-process", "2"), ("--workers", "2"))
LIMITS = {"few descriptors": (RLIMIT_NOFILE, 6, 100), "short files": (RLIMIT_FSIZE, 1, 400 * 1024)}
SETTINGS = [word for one in (*DIGITS, "train.save_every=3") for word in ("--set", one)]


def command(
    folder: Path, spec: str, workers: tuple[str, str], *more: str, limit: tuple[int, int] | None = None
) -> tuple[int, str]:
    """The exit status, and what was said."""
    words = [*COMMAND, "train", "digits", *workers, "--folder", str(folder), "--set", f"sync.spec={spec}", *SETTINGS]
    lower = None if limit is None else partial(setrlimit, limit[0], (limit[1], limit[1]))
    done = subprocess.run([*words, *more], capture_output=True, text=True, timeout=600, preexec_fn=lower)
    return done.returncode, done.stderr


def fault(campaign: Campaign, root: Path, ends: dict[tuple[str, ...], dict[str, torch.Tensor]]) -> None:
    draw = campaign.random
    kind, spec, workers = draw.choice(list(LIMITS)), draw.choice(SPECS), draw.choice(WORKERS)
    number, least, most = LIMITS[kind]
    value, folder = draw.randrange(least, most), root / f"run-{campaign.total}"
    campaign.made(f"{kind}, {workers[0]}")
    where = f"{spec} {workers[0]} with {value} as the limit of {kind}"
    try:
        status, said = command(folder, spec, workers, limit=(number, value))
        campaign.expect(status in (0, 1, 2), "traceback", f"{where}: {status} {said[-2000:]}")
        campaign.expect("Traceback" not in said, "traceback", f"{where}: {said[-2000:]}")
        status, said = command(folder, spec, workers, "--resume")
        if (spec, *workers) not in ends:
            command(root / "whole", spec, workers, "--overwrite")
            ends[spec, *workers] = saved(root / "whole")
    except subprocess.TimeoutExpired:
        campaign.fail("hang", where)
        return
    if status:
        campaign.fail("traceback", f"{where}, then without it: {said[-2000:]}")
    else:
        same = fixtures.same(saved(folder), ends[spec, *workers])
        campaign.expect(same, "wrong result", f"{where}: it ends elsewhere")


def run(campaign: Campaign) -> None:
    ends: dict[tuple[str, ...], dict[str, torch.Tensor]] = {}
    with tempfile.TemporaryDirectory() as root:
        while campaign.going():
            fault(campaign, Path(root), ends)
