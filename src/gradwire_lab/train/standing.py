"""Standing: the rank that a launcher has given to this process, read from its environment.

    torchrun             RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT
    mpirun (Open MPI)    OMPI_COMM_WORLD_RANK, ..._SIZE, ..._LOCAL_RANK
    mpirun (MPICH)       PMI_RANK, PMI_SIZE, MPI_LOCALRANKID
    horovodrun           HOROVOD_RANK, HOROVOD_SIZE, HOROVOD_LOCAL_RANK
    srun                 SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID

Rank 0 waits for the others at MASTER_ADDR:MASTER_PORT. Where the launcher does not set them: horovodrun says where it
runs itself, Slurm lists its nodes and rank 0 is on the first, and processes that are all on one host meet at 127.0.0.1.
Otherwise MASTER_ADDR must be given: ``mpirun -x MASTER_ADDR=host0 ...``.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

PORT = 29_500

Environment = Mapping[str, str]


class Standing(NamedTuple):
    """A rank among others.

    Attributes:
        rank: Among all.
        world: How many there are.
        local: Among those on this host.
        beside: How many are on this host, as far as is known.
        address: Where rank 0 is.
        port: Where it waits.
        hosted: Whether somebody else, torchrun's agent, keeps the meeting place.
        attempt: How often torchrun has started all ranks anew.
    """

    rank: int
    world: int
    local: int
    beside: int
    address: str
    port: int
    hosted: bool = False
    attempt: int = 0


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


def standing(environment: Environment) -> Standing | None:
    """Where this process stands; None if nobody launched it as one of several.

    Raises:
        ValueError: It is one of several, but nothing says where they meet.
    """
    for launcher, (rank, size, local, beside) in _LAUNCHERS.items():
        if rank in environment and size in environment:
            world = int(environment[size])
            if launcher == "srun" and world == 1:
                continue  # an interactive shell of Slurm's, in which anything may be started
            here = int(environment.get(beside) or 1)
            together = here == world
            return Standing(
                int(environment[rank]),
                world,
                int(environment.get(local, 0)),
                here,
                _address(launcher, environment, together),
                int(environment.get("MASTER_PORT") or _port(environment)),
                environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
                int(environment.get("TORCHELASTIC_RESTART_COUNT", 0)),
            )
    return None


def _address(launcher: str, environment: Environment, together: bool) -> str:
    given = environment.get("MASTER_ADDR")
    if given:
        return given
    if launcher == "horovodrun" and "HOROVOD_GLOO_RENDEZVOUS_ADDR" in environment:
        return environment["HOROVOD_GLOO_RENDEZVOUS_ADDR"]
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    if nodes:
        return first_node(nodes)
    if together:
        return "127.0.0.1"
    raise ValueError(
        f"{launcher} started ranks on several hosts, and nothing says where rank 0 is; "
        "pass its name on, as in: mpirun -x MASTER_ADDR=host0 ..."
    )


def _port(environment: Environment) -> int:
    """Jobs that share a node should not meet: Slurm's have numbers of their own."""
    job = environment.get("SLURM_JOB_ID", "")
    return 20_000 + int(job) % 10_000 if job.isdigit() else PORT


def first_node(nodes: str) -> str:
    """The first of Slurm's list of nodes: ``gpu[07-09,12],cpu1`` begins with ``gpu07``."""
    found = re.match(r"([^,\[]+)(?:\[(\w+))?", nodes)
    if found is None:
        raise ValueError(f"cannot read the list of nodes {nodes!r}; set MASTER_ADDR to the host of rank 0")
    return found[1] + (found[2] or "")
