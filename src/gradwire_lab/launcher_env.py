"""Launcher environment: the rank that torchrun, mpirun, horovodrun or srun has given to this process.

    torchrun             RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT
    mpirun (Open MPI)    OMPI_COMM_WORLD_RANK, ..._SIZE, ..._LOCAL_RANK
    mpirun (MPICH)       PMI_RANK, PMI_SIZE, MPI_LOCALRANKID
    horovodrun           HOROVOD_RANK, HOROVOD_SIZE, HOROVOD_LOCAL_RANK
    srun                 SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID

Rank 0 listens at MASTER_ADDR:MASTER_PORT. Where the launcher does not set them: horovodrun gives its own address, Slurm
lists its nodes and rank 0 is on the first, and processes that are all on one host use 127.0.0.1. Otherwise MASTER_ADDR
must be given: ``mpirun -x MASTER_ADDR=host0 ...``.
"""

import ipaddress
import re
import socket
from collections.abc import Mapping
from typing import NamedTuple

PORT = 29_500

Environment = Mapping[str, str]


class LauncherRank(NamedTuple):
    """A rank among those that a launcher started.

    Attributes:
        rank: Among all.
        world: How many ranks there are.
        local_rank: Among those on this host.
        local_world: How many are on this host, as far as is known.
        address: The host of rank 0.
        port: Where rank 0 listens.
        has_agent_store: Whether torchrun's agent, not rank 0, keeps the rendezvous store.
        attempt: How often torchrun has restarted all ranks.
        supervised: Whether the launcher's process lives as long as its ranks. Variables that were set by hand do not.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int
    address: str
    port: int
    has_agent_store: bool = False
    attempt: int = 0
    supervised: bool = False

    def listen(self) -> int | None:
        """The descriptor of a socket that listens at the rendezvous address alone, for the store of rank 0.

        None where the address is a name, which other hosts may resolve differently, or not this host's: torch then
        listens on all interfaces.
        """
        try:
            ipaddress.ip_address(self.address)
            return socket.create_server((self.address, self.port), backlog=2048).detach()
        except (ValueError, OSError):
            return None


# Rank, size, rank on this host, ranks on this host; by launcher, the most particular first.
_LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "horovodrun": ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    "mpirun": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "mpiexec": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
}


def launcher_rank(environment: Environment) -> LauncherRank | None:
    """The rank of this process; None if no launcher started it as one of several.

    Raises:
        ValueError: It is one of several, but the address of rank 0 is not known.
    """
    for launcher, (rank, size, local, local_size) in _LAUNCHERS.items():
        if rank in environment and size in environment:
            world = int(environment[size])
            if launcher == "srun" and world == 1:
                continue  # an interactive shell of Slurm, in which any command may be started
            local_world = int(environment.get(local_size) or 1)
            return LauncherRank(
                int(environment[rank]),
                world,
                int(environment.get(local, 0)),
                local_world,
                _address(launcher, environment, local_world == world),
                int(environment.get("MASTER_PORT") or _port(environment)),
                environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
                int(environment.get("TORCHELASTIC_RESTART_COUNT", 0)),
                launcher != "torchrun" or "TORCHELASTIC_RUN_ID" in environment,
            )
    return None


def _address(launcher: str, environment: Environment, one_host: bool) -> str:
    given = environment.get("MASTER_ADDR")
    if given:
        return given
    if launcher == "horovodrun" and "HOROVOD_GLOO_RENDEZVOUS_ADDR" in environment:
        return environment["HOROVOD_GLOO_RENDEZVOUS_ADDR"]
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    if nodes:
        return first_node(nodes)
    if one_host:
        return "127.0.0.1"
    raise ValueError(
        f"{launcher} started ranks on several hosts, and the host of rank 0 is not known; "
        "pass its name on, as in: mpirun -x MASTER_ADDR=host0 ..."
    )


def _port(environment: Environment) -> int:
    """Slurm jobs that share a node need different ports; their numbers give them."""
    job = environment.get("SLURM_JOB_ID", "")
    return 20_000 + int(job) % 10_000 if job.isdigit() else PORT


def first_node(nodes: str) -> str:
    """The first of Slurm's list of nodes: ``gpu[07-09,12],cpu1`` begins with ``gpu07``."""
    match = re.match(r"([^,\[]+)(?:\[(\w+))?", nodes)
    if match is None:
        raise ValueError(f"cannot read the list of nodes {nodes!r}; set MASTER_ADDR to the host of rank 0")
    return match[1] + (match[2] or "")
