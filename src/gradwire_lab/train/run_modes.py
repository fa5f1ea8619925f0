"""Run modes: all workers in this process, one rank of a launcher's, or one process started here for each worker."""

import os
import re
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from gradwire.integrations.auto import AUTO
from gradwire_lab import launch
from gradwire_lab.launcher_env import LauncherRank
from gradwire_lab.parent_watch import end_with_parent
from gradwire_lab.train.loop import Listener
from gradwire_lab.train.rank_info import RankInfo, simulated_ranks
from gradwire_lab.train.run_recipe import TrainJob, run_recipe

RESTARTS = 3  # of a worker that may die and come back


class TrainingRefused(ValueError):
    """A rank refused the recipe; the message has the reason."""


def train_in_process(job: TrainJob, world: int, listen: Listener) -> dict[str, Any]:
    """All workers in this process, in lockstep, on one device."""
    if job.recipe.sync.spec == AUTO:
        raise ValueError(
            "sync.spec = 'auto' measures a network, and simulated workers have none; give --workers instead"
        )
    return run_recipe(job, simulated_ranks(world, device_of(0, job.devices)), listen)


def train_as_rank(job: TrainJob, where: LauncherRank, listen: Listener) -> dict[str, Any]:
    """One rank of those that torchrun, mpirun or srun has started; after a restart, from the last checkpoint."""
    if where.supervised:
        end_with_parent(os.getppid())
    job = job._replace(resume=job.resume or where.attempt > 0)
    device = device_of(where.local_rank, job.devices)
    if job.recipe.gossip.elastic:
        return _train_rank(job, where.world, where.rank, device, listen)
    named = min(where.local_world, len(job.devices)) if job.devices else where.local_world
    with launch.join_group(where, backend_of(device, job.devices, named), _timeout(job)):
        return _train_rank(job, where.world, where.rank, device, listen)


def train_spawned(job: TrainJob, world: int, listen: Listener) -> dict[str, Any]:
    """Processes that are started here, one for each worker."""
    refusals: list[Exception] = []

    def on_message(rank: int, message: Any) -> None:
        if isinstance(message, Exception):
            refusals.append(message)
        elif rank == 0 or message["event"] == "back":
            listen(message)

    def on_restart(rank: int, why: str) -> None:
        listen({"event": "restarted", "worker": rank, "why": why})

    elastic = job.recipe.gossip.elastic
    backend = "" if elastic else backend_of(device_of(0, job.devices), job.devices, world)
    options: dict[str, Any] = {"on_message": on_message, "on_restart": on_restart, "timeout": _timeout(job)}
    try:
        finals = launch.launch(_rank, world, job, backend=backend, restarts=RESTARTS if elastic else 0, **options)
    except launch.RankError:
        if refusals:
            raise refusals[0] from None
        raise
    final: dict[str, Any] = next(final for final in finals if final is not None)
    return final


def _rank(rank: int, world: int, job: TrainJob) -> dict[str, Any]:
    try:
        return _train_rank(job, world, rank, device_of(rank, job.devices), launch.send_message)
    except ValueError as error:
        launch.send_message(TrainingRefused(str(error)))
        raise
    except OSError as error:
        launch.send_message(OSError(error.errno, error.strerror, error.filename))
        raise


def _train_rank(job: TrainJob, world: int, rank: int, device: torch.device, listen: Listener) -> dict[str, Any]:
    rendezvous = job.folder / "meeting" if job.recipe.gossip.elastic else None
    return run_recipe(job, RankInfo(world, (rank,), device, rendezvous), listen)


def _timeout(job: TrainJob) -> timedelta:
    return timedelta(seconds=job.recipe.sync.timeout)


# -- devices -----------------------------------------------------------------------------------------------------------


def devices_of(text: str, workers: int | None = None) -> tuple[str, ...]:
    """The devices of a comma-separated list.

    Raises:
        ValueError: One of them is not here, or there are more devices than ``workers``.
    """
    names = tuple(filter(None, (name.strip() for name in text.split(","))))
    for name in names:
        _check_device(name)
    if workers is not None and len(names) > workers:
        raise ValueError(f"{text} are {len(names)} devices, and only {workers} can be used; name one for each process")
    return names


def _check_device(name: str) -> None:
    known = re.fullmatch(r"cpu|cuda|(?:cuda:)?(\d+)", name)
    if known is None:
        raise ValueError(f"there is no device {name!r}; write cpu, or the number of a GPU")
    number, count = int(known[1] or 0), torch.cuda.device_count()
    if name != "cpu" and number >= count:
        here = f"{count}, numbered from 0" if count else "none"
        raise ValueError(f"there is no GPU {number}: of those that torch can use, this host has {here}")


def device_of(local: int, devices: Sequence[str]) -> torch.device:
    """The device of a rank of this host: as named, else the GPUs in turn, else the CPU."""
    if devices:
        name = devices[local % len(devices)]
        return torch.device(f"cuda:{name}" if name.isdigit() else name)
    if torch.cuda.is_available():
        return torch.device("cuda", local % torch.cuda.device_count())
    return torch.device("cpu")


def backend_of(device: torch.device, devices: Sequence[str], local: int) -> str:
    """NCCL, where each of the ``local`` ranks of this host has a GPU of its own; gloo everywhere else.

    A launcher may show each rank its own GPU and nothing else, so that one name stands for different GPUs.
    """
    if device.type != "cuda":
        return "gloo"
    named = [devices[i % len(devices)] for i in range(local)] if devices else []
    apart = len(set(named)) == local if named else local <= torch.cuda.device_count()
    return "nccl" if apart else "gloo"
