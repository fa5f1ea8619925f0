"""Real processes in a real gloo group, started fast and always stopped.

Arguments and results cross as bytes: a tensor that arrives shares no memory with the one that was sent.
"""

import datetime
import pickle
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradwire_lab import launch
from gradwire_lab.launch import RankError

# Imported once in the fork server and inherited by every rank; what is missing is skipped. Optimizers import dynamo.
PRELOAD = [
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "numpy",
    "hypothesis",
    "pytest",
    "gradwire",
    "gradwire_lab.cli.main",
    "gradwire_lab.train.demo",
    "gradwire_lab.train.run_modes",
    "tests.malloc_keeps",
]
# The same where tests of these folders run.
FOLDERS = {"trainers": "tests.trainer_imports", "train": "sklearn.datasets", "gossip": "networkx", "wire": "networkx"}
LAST = "tests.numba_tables"
COLLECTIVE_TIMEOUT = datetime.timedelta(seconds=100)
LIMIT_SECONDS = 250.0  # for all ranks together; pytest waits a little longer


class Answers(dict[str, Any]):
    """What all ranks returned, by case. A case that failed raises its error where it is read."""

    def __getitem__(self, case: str) -> Any:
        answer = super().__getitem__(case)
        if isinstance(answer, Exception):
            raise answer
        return answer


def preload(*more: str) -> None:
    """Name what the fork server imports. It starts, and freezes its environment, at first use.

    A process has one fork server, which serves these ranks and those that the tested code starts.
    """
    launch.PRELOAD = (*PRELOAD, *more, LAST)
    launch.preload()


def start_server() -> None:
    """Start the fork server before the first ranks need it."""
    forkserver.ensure_running()


def run_ranks(function: Callable[..., Any], world: int, *args: Any, timeout: float = LIMIT_SECONDS) -> list[Any]:
    """Call ``function(rank, world, *args)`` in every rank of a gloo group.

    Args:
        function: Defined at the top of a module, so that a new process can import it.
        world: Number of processes.
        args: Copied to every rank.
        timeout: Seconds until ranks that have not answered are killed.

    Returns:
        What each rank returned, in rank order.

    Raises:
        RankError: A rank raised or died; of several, the one that died, or the first to raise.
        TimeoutError: Some ranks did not answer in time.
    """
    return launch.launch(
        function, world, *args, timeout=COLLECTIVE_TIMEOUT, limit_seconds=timeout, grace_seconds=0, threads=1
    )


def run_cases(
    function: Callable[..., Any], world: int, cases: Mapping[str, Any], *args: Any, timeout: float = LIMIT_SECONDS
) -> Answers:
    """Call ``function(rank, world, case, *args)`` for one case after the other, in one group.

    A case that fails ends its group. The cases after it run in a new one, so that no failure hides another.

    Args:
        function: As for `run_ranks`.
        world: Number of processes.
        cases: By name.
        args: Copied to every rank.
        timeout: Seconds for all cases together.

    Returns:
        A list by rank for each case.
    """
    deadline, names, answers = time.monotonic() + timeout, list(cases), Answers()
    while names:
        with tempfile.TemporaryDirectory() as folder:
            values = [cases[name] for name in names]
            error = _error_of(_run_all, world, function, values, args, folder, timeout=deadline - time.monotonic())
            for done in _finished(folder, world, len(names)):
                answers[names.pop(0)] = done
        if error is not None and not names:
            raise error
        if error is not None:
            answers[names.pop(0)] = error
    return answers


def _error_of(*args: Any, timeout: float) -> Exception | None:
    try:
        run_ranks(*args, timeout=timeout)
    except (RankError, TimeoutError) as error:
        return error
    return None


def _run_all(rank: int, world: int, function: Callable[..., Any], cases: list[Any], args: Any, folder: str) -> None:
    for i, case in enumerate(cases):
        whole = Path(folder, f"{i}-{rank}")
        partial = whole.with_suffix(".partial")
        partial.write_bytes(pickle.dumps(function(rank, world, case, *args)))
        partial.rename(whole)


def _finished(folder: str, world: int, count: int) -> Iterator[list[Any]]:
    """The answers of all ranks, up to the first case that some rank has not finished."""
    for i in range(count):
        files = [Path(folder, f"{i}-{rank}") for rank in range(world)]
        if not all(file.exists() for file in files):
            return
        yield [pickle.loads(file.read_bytes()) for file in files]


def call_case(rank: int, world: int, case: Callable[..., Any], *args: Any) -> Any:
    """For `run_cases` where every case is a function of its own."""
    return case(rank, world, *args)


def cases_fixture(
    function: Callable[..., Any], worlds: int | Sequence[int], cases: Mapping[str, Any], timeout: float = LIMIT_SECONDS
) -> Any:
    """A fixture of a module: `run_cases` with those cases that are parameters of its selected tests."""

    @pytest.fixture(scope="module", params=[worlds] if isinstance(worlds, int) else worlds, ids=lambda n: f"world{n}")
    def answers(request: pytest.FixtureRequest) -> Answers:
        specs = [item.callspec for item in request.session.items if item.module is request.module and _has_case(item)]
        selected = {spec.params["case"] for spec in specs}
        chosen = {name: cases[name] for name in cases if name in selected}
        return run_cases(function, request.param, chosen, timeout=timeout)

    return answers


def use_nccl() -> None:
    """In the only rank of a group: use NCCL on the first GPU from now on."""
    if dist.get_backend() != "nccl":
        dist.destroy_process_group()
        torch.cuda.set_device(0)
        device = torch.device("cuda", 0)
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)


def _has_case(item: Any) -> bool:
    return "case" in getattr(getattr(item, "callspec", None), "params", ())
