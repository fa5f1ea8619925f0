"""``gradwire doctor``: whether this machine, or all ranks that a launcher started, can train together."""

import os
import platform
import socket
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, NamedTuple

import torch
import typer

from gradwire.comm import liveness
from gradwire.comm.backend import Backend
from gradwire.comm.collectives import AllGatherOp, AllReduceOp
from gradwire.comm.torch_backend import connect
from gradwire.integrations.consistency import gather_notes
from gradwire.version import VERSION
from gradwire_lab.cli.output import refusing
from gradwire_lab.launch import join_group
from gradwire_lab.launcher_env import LauncherRank, launcher_rank
from gradwire_lab.perf_model.probe import measured_link, timeout_message

_LEAST_TORCH = (2, 8)
_CLOCK_SECONDS = 1.0  # by which clocks may differ, before logs of several hosts can no longer be read together


class Finding(NamedTuple):
    """What was looked at, what was found, and what to do about it; nothing, if it is well."""

    what: str
    value: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{'fix' if self.remedy else 'ok':4} {self.what:18} {self.value}" + (
            f"; {self.remedy}" * bool(self.remedy)
        )


def doctor(
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for other ranks.")] = 20.0,
) -> None:
    """Check versions, backends, interfaces, ports, clocks and the link between ranks, and print what to fix.

    Alone it checks this machine. If torchrun, mpirun or srun starts it, as they start a training, it also checks the
    other ranks, and rank 0 prints what holds for all. The exit code is 1 if something needs to be fixed.
    """
    with refusing("doctor", ValueError):
        where = launcher_rank(os.environ)
        findings = [*versions(), *backends(), *interfaces(os.environ, where)]
        if where is not None and where.world > 1:
            findings += between_ranks(where, timeout)
    if where is None or where.rank == 0 or any(one.remedy for one in findings):
        title = "this machine" if where is None else f"rank {where.rank} of {where.world} on {socket.gethostname()}"
        typer.echo("\n".join([title, *map(str, findings)]))
    if any(one.remedy for one in findings):
        raise typer.Exit(1)


def versions() -> Iterator[Finding]:
    """What is installed."""
    yield Finding("gradwire", f"{VERSION}, Python {platform.python_version()}")
    installed = tuple(int(part) for part in torch.__version__.split(".")[:2])
    yield Finding("torch", torch.__version__, "" if installed >= _LEAST_TORCH else "install torch 2.8 or newer")
    for package in ("numba", "safetensors"):
        yield _package(package)
    if torch.cuda.is_available():
        yield _package("triton")


def _package(name: str) -> Finding:
    try:
        return Finding(name, version(name))
    except PackageNotFoundError:
        return Finding(name, "missing", f"pip install {name}")


def backends() -> Iterator[Finding]:
    """What can carry messages."""
    if not torch.distributed.is_available():
        yield Finding("backend", "none", "install a torch that was built with torch.distributed")
        return
    yield (
        Finding("gloo", "available")
        if torch.distributed.is_gloo_available()
        else Finding("gloo", "missing", "install a torch that was built with gloo, which small agreements use")
    )
    if torch.cuda.is_available():
        has_nccl = torch.distributed.is_nccl_available()
        note = "available; gradwire's own tests run it with one rank only" if has_nccl else "missing"
        yield Finding("nccl", note, "" if has_nccl else "install a CUDA build of torch")
        yield Finding("GPUs", f"{torch.cuda.device_count()}, {torch.cuda.get_device_name()}")


def interfaces(environment: Mapping[str, str], where: LauncherRank | None) -> Iterator[Finding]:
    """Names of network interfaces, and whether other hosts can reach the addresses that are handed out."""
    names = [name for _, name in socket.if_nameindex()]
    yield Finding("interfaces", ", ".join(names))
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if variable in environment:
            prefix = environment[variable].lstrip("^=").split(",")
            known = any(name.startswith(tuple(prefix)) for name in names)
            yield Finding(variable, environment[variable], "" if known else f"set it to one of {', '.join(names)}")
    several = where is not None and where.local_world < where.world
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        address = "no address"
    unreachable = address.startswith(("127.", "no ")) and "GLOO_SOCKET_IFNAME" not in environment
    remedy = "set GLOO_SOCKET_IFNAME to the interface that leads to the other hosts"
    note = "; on several hosts, set GLOO_SOCKET_IFNAME" * (unreachable and not several)
    yield Finding("host", f"{socket.gethostname()} has {address}{note}", remedy * (several and unreachable))
    if where is not None:
        local = several and where.address in ("localhost", "127.0.0.1", "::1")
        found = f"{where.address}:{where.port}"
        yield Finding("rendezvous", found, "set MASTER_ADDR to an address of rank 0 that other hosts reach" * local)


def between_ranks(where: LauncherRank, timeout: float) -> list[Finding]:
    """What only all ranks together can see."""
    limit = timedelta(seconds=timeout)
    try:
        with join_group(where, "gloo", limit, limit):
            link = connect(timeout=limit)
            gather_notes(link, {"spec": f"torch {torch.__version__}"})
            return [Finding("ranks", f"{link.world} agree on versions"), *ports(link), clocks(link), speed(link)]
    except RuntimeError:  # a rank never came, and torch says so in many ways
        return [Finding("ranks", "not all came", timeout_message(timeout))]


def ports(link: Backend) -> Iterator[Finding]:
    """Whether this rank can connect to ports of the others, as it must to find out which rank was lost."""
    addresses = getattr(getattr(link, "inner", link), "probe_addresses", {})
    others = {rank: one for rank, one in addresses.items() if rank != link.rank and one.address}
    closed = [rank for rank, number in liveness.probe(others, liveness.SECONDS).items() if number]
    link.move(AllReduceOp(torch.zeros(1, device=link.device), "max"))  # none ends before all have looked
    remedy = f"let firewalls pass connections to ranks {closed}" if closed else ""
    yield Finding("ports", f"{len(others) - len(closed)} of {len(others)} other ranks can be reached", remedy)


def clocks(link: Backend) -> Finding:
    """By how much the clocks of ranks differ, up to the time of a message."""
    link.move(AllReduceOp(torch.zeros(1, device=link.device), "max"))
    times = link.move(AllGatherOp(torch.tensor([time.time()], dtype=torch.float64, device=link.device)))
    spread = float(times.max() - times.min())
    remedy = "synchronize the clocks, for example with chrony" if spread > _CLOCK_SECONDS else ""
    return Finding("clocks", f"within {max(spread, 0.001):.3f} s", remedy)


def speed(link: Backend) -> Finding:
    """What the link between ranks can do."""
    return Finding("link", f"about {measured_link(link)}; gradwire advise predicts whether compression pays on it")
