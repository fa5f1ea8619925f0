"""Soak: many steps, saves and loads; memory, descriptors and threads stay as they were."""

import gc
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch

import fixtures
import gradwire
from faults.campaign import Campaign
from faults.nan_storms import SPECS
from gossip_fixtures import optimizers, replicas
from gossip_fixtures import train as train_gossip

KIB_PER_ROUND = 4.0  # what memory may grow by, in each round after the first half
FROM_FILE = 0.1  # of all loads: safetensors 0.8.0 keeps 56 bytes of each matrix that it reads from a file


def resident_kib() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1])
    raise OSError("/proc/self/status has no VmRSS")


def used() -> dict[str, int]:
    gc.collect()
    return {
        "memory_kib": resident_kib(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
    }


def round_of(draw: Any, folder: Path) -> int:
    """Attach, train, save, load, and train on; the number of steps."""
    options = {**draw.choice(SPECS), "seed": draw.randrange(100)}
    nets, workers = fixtures.replicas(2, **options)
    fixtures.train_steps(nets, workers, range(10))
    for wire in workers.wires:
        gradwire.save(wire, folder)
        wire.report()
    from_file = draw.random() < FROM_FILE
    for wire in workers.wires:
        gradwire.load(wire, folder) if from_file else wire.load_state_dict(wire.state_dict())
    fixtures.train_steps(nets, workers, range(10, 15))
    models = replicas(3)
    net = gradwire.gossip_lockstep(models, "choco(ring, gamma=0.5)", "topk(0.1)")
    train_gossip(net, models, optimizers(models), range(3), range(5))
    return 20


def run(campaign: Campaign) -> None:
    torch.set_num_threads(1)
    draw, samples = campaign.random, list[dict[str, int]]()
    with tempfile.TemporaryDirectory() as folder:
        while campaign.going():
            campaign.made("steps", round_of(draw, Path(folder)))
            samples.append(used())
    check(campaign, samples)


def check(campaign: Campaign, samples: list[dict[str, int]]) -> None:
    """The second half of the samples against its beginning: the first half may still fill caches."""
    half = samples[len(samples) // 2 :]
    first, last = half[0], half[-1]
    growth = (last["memory_kib"] - first["memory_kib"]) / max(1, len(half) - 1)
    enough = len(half) > 200  # fewer rounds say little of so small a growth
    campaign.expect(growth < KIB_PER_ROUND or not enough, "orphan", f"memory grows by {growth:.1f} KiB a round")
    for name in ("descriptors", "threads"):
        campaign.expect(last[name] <= first[name], "orphan", f"{first[name]} {name} became {last[name]}")
    campaign.facts = {"rounds": len(samples), "half way": first, "end": last, "KiB a round": round(growth, 2)}
