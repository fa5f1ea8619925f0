"""Calibration cache: earlier calibrations, filed under all that they depend on."""

import hashlib
import json
import os
import platform
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gradwire.version import VERSION
from gradwire_lab.launch import usable_cores
from gradwire_lab.perf_model.calibration import Calibration, load, save

NOT_KEPT = "so not kept"  # stands in the note of figures that were measured on a busy machine
REPEAT = (
    "\nThis machine was busy when the figures were measured. They, and H, may be far off. Repeat this when it is "
    "idle, or measure once with --save FILE while it is, and read that with --calibration FILE."
)


def folder() -> Path:
    """Where caches of this user are."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "gradwire" / "calibrations"


def place(facts: Mapping[str, Any]) -> Path:
    """Where figures lie that depend on these facts, and on this machine and what is installed on it."""
    here = {"processor": _processor(), "cores": usable_cores(), "torch": torch.__version__, "gradwire": VERSION}
    here |= {name: os.environ.get(name) for name in ("GRADWIRE_KERNELS", "OMP_NUM_THREADS")}
    key = json.dumps({**here, **facts}, sort_keys=True, default=str)
    return folder() / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"


def disturbance() -> str:
    """What makes figures of now not worth keeping: others at work on this machine. Empty where there is nothing."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return (
        f"next to other work (load {load:.0f} on {usable_cores()} cores), {NOT_KEPT}" if load > usable_cores() else ""
    )


def find(path: Path) -> Calibration | None:
    """Figures of an earlier time, which their note then names; None if there are none."""
    try:
        found = load(path)
    except ValueError:
        return None
    day = time.strftime("%Y-%m-%d %H:%M", time.localtime(path.stat().st_mtime))
    return replace(found, note=f"{found.note}, on {day} (--fresh measures again)")


def keep(found: Calibration, path: Path) -> None:
    """File figures; a home that cannot be written to is no reason to give no advice."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        save(found, part)
        part.replace(path)  # two who measure at once leave one whole file


def _processor() -> str:
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return platform.processor() or platform.machine()
