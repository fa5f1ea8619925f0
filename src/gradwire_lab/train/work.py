"""Work: how a training is spread over processes: all workers in this one, one of a launcher's, or ranks of our own."""

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gradwire.integrations.auto import AUTO
from gradwire_lab.train import launch
from gradwire_lab.train.loop import Listener
from gradwire_lab.train.place import Place, alone
from gradwire_lab.train.recipe import Recipe
from gradwire_lab.train.run import sit
from gradwire_lab.train.standing import Standing

REVIVALS = 3  # of a worker that may die and come back


class Refused(ValueError):
    """A rank found something wrong with what a person asked for; the sentence says what."""


class Job(NamedTuple):
    """A training to be done."""

    recipe: Recipe
    folder: Path
    devices: tuple[str, ...] = ()
    resume: bool = False
    title: str = ""


def in_process(job: Job, world: int, listen: Listener) -> dict[str, Any]:
    """All workers here, in lockstep, on one device."""
    if job.recipe.sync.spec == AUTO:
        raise ValueError("sync.spec = 'auto' measures a network, and virtual workers have none; give --workers instead")
    return sit(job.recipe, alone(world, device_of(0, job.devices)), job.folder, listen, job.resume, job.title)


def as_rank(job: Job, where: Standing, listen: Listener) -> dict[str, Any]:
    """One rank of those that torchrun, mpirun or srun has started; after a restart, from the last checkpoint."""
    device = device_of(where.local, job.devices)
    if job.recipe.gossip.elastic:
        return _sit(job, where.world, where.rank, device, listen, job.resume or where.attempt > 0)
    named = min(where.beside, len(job.devices)) if job.devices else where.beside
    with launch.joined(where, backend_of(device, job.devices, named), _patience(job)):
        return _sit(job, where.world, where.rank, device, listen, job.resume or where.attempt > 0)


def spawned(job: Job, world: int, listen: Listener) -> dict[str, Any]:
    """Ranks of our own, on this machine."""
    refusals: list[str] = []

    def hear(rank: int, news: Any) -> None:
        if isinstance(news, str):
            refusals.append(news)
        elif rank == 0 or news["event"] == "back":
            listen(news)

    elastic = job.recipe.gossip.elastic
    backend = "" if elastic else backend_of(device_of(0, job.devices), job.devices, world)
    options: dict[str, Any] = {"patience": _patience(job), "revivals": REVIVALS if elastic else 0}
    options["mourn"] = lambda rank, why: listen({"event": "anew", "worker": rank, "why": why})
    try:
        finals = launch.launch(_rank, world, job, hear=hear, backend=backend, **options)
    except launch.RankError:
        if refusals:
            raise Refused(refusals[0]) from None
        raise
    final: dict[str, Any] = next(final for final in finals if final is not None)
    return final


def _rank(rank: int, world: int, job: Job) -> dict[str, Any]:
    device = device_of(rank, job.devices)
    try:
        return _sit(job, world, rank, device, launch.tell, job.resume)
    except ValueError as wrong:
        launch.tell(str(wrong))
        raise


def _sit(job: Job, world: int, rank: int, device: torch.device, listen: Listener, resume: bool) -> dict[str, Any]:
    meeting = job.folder / "meeting" if job.recipe.gossip.elastic else None
    return sit(job.recipe, Place(world, (rank,), device, meeting), job.folder, listen, resume, job.title)


def _patience(job: Job) -> timedelta:
    return timedelta(seconds=job.recipe.sync.timeout)


# -- devices -----------------------------------------------------------------------------------------------------------


def devices_of(text: str, workers: int | None = None) -> tuple[str, ...]:
    """The devices that a person named, parted by commas.

    Raises:
        ValueError: One of them is not here, or there are more than ``workers`` of this process's or its children.
    """
    names = tuple(filter(None, (name.strip() for name in text.split(","))))
    for name in names:
        _check_device(name)
    if workers is not None and len(names) > workers:
        raise ValueError(f"{text} are {len(names)} devices, and only {workers} can be used; name one for each process")
    return names


def _check_device(name: str) -> None:
    try:
        device = torch.device(f"cuda:{name}" if name.isdigit() else name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"there is no device {name!r}; write cpu, or the number of a GPU")
    number = int(name) if name.isdigit() else device.index or 0  # torch keeps eight bits of it
    count = torch.cuda.device_count()
    if device.type == "cuda" and number >= count:
        here = f"{count}, numbered from 0" if count else "none"
        raise ValueError(f"there is no GPU {number}: of those that torch can use, this host has {here}")


def device_of(local: int, devices: Sequence[str]) -> torch.device:
    """The device of a rank of this host: as told, else the GPUs in turn, else the CPU."""
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
