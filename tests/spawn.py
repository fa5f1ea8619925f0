"""Real processes in a real gloo group, started fast and always reaped.

Everything crosses as bytes: a tensor that arrives never shares memory with the one that was sent.
"""

import datetime
import io
import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradwire_lab.train import launch

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
    "gradwire_lab.train.digits",
    "gradwire_lab.train.work",
    "tests.numba_tables",
]
PATIENCE = datetime.timedelta(seconds=30)  # of one collective

_context = multiprocessing.get_context("forkserver")


class RankError(RuntimeError):
    """A rank raised, or died; the message names it and holds its traceback."""


def preload() -> None:
    """Name what the fork server imports. It starts, and freezes its environment, at first use.

    There is one in a process: whether it starts for a test or for what a test calls, it must serve all the others.
    """
    launch.PRELOAD = (*launch.PRELOAD, *PRELOAD)
    launch.prepare()


def start_server() -> None:
    """Have it started already when the first ranks are."""
    forkserver.ensure_running()


def run_ranks(function: Callable[..., Any], world: int, *args: Any, timeout: float = 60) -> list[Any]:
    """Call ``function(rank, world, *args)`` in every rank of a gloo group.

    Args:
        function: Lives at the top of a module, so that a fresh process can import it.
        world: How many processes.
        args: Copied to every rank.
        timeout: Seconds until ranks that have not answered are killed.

    Returns:
        What each rank returned, in rank order.

    Raises:
        RankError: A rank raised or died; of several, the one that died, or the first to raise.
        TimeoutError: Some ranks did not answer in time.
    """
    deadline = time.monotonic() + timeout
    job = _pack((function, args))
    with tempfile.TemporaryDirectory() as folder, _started(world, job, folder) as ranks:
        return _collect(ranks, deadline, timeout)


Rank = tuple[ForkServerProcess, Connection]


@contextmanager
def _started(world: int, job: bytes, folder: str) -> Iterator[list[Rank]]:
    ranks: list[Rank] = []
    try:
        for rank in range(world):
            ours, theirs = _context.Pipe()
            process = _context.Process(target=_rank, args=(rank, world, folder, job, theirs), daemon=True)
            ranks.append((process, ours))
            with closing(theirs):  # or a rank's death would not show as the end of its pipe
                process.start()
        yield ranks
        _reap(ranks, grace=5)
    except BaseException:
        _reap(ranks, grace=0)
        raise


def _collect(ranks: list[Rank], deadline: float, timeout: float) -> list[Any]:
    silent = {pipe: rank for rank, (_, pipe) in enumerate(ranks)}
    results: dict[int, Any] = {}
    while silent:
        ready = wait(list(silent), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            late = ", ".join(str(rank) for rank in sorted(silent.values()))
            raise TimeoutError(f"no answer within {timeout:g} s from rank {late} of {len(ranks)}")
        failures = []
        for pipe in ready:
            rank = silent.pop(pipe)
            moment, ok, answer = _receive(ranks[rank])
            if ok:
                results[rank] = answer
            else:
                failures.append((moment, rank, answer))
        if failures:  # the others often fail because of the first
            _, rank, text = min(failures)
            raise RankError(f"rank {rank} of {len(ranks)} failed:\n{text}")
    return [results[rank] for rank in range(len(ranks))]


def _receive(rank: Rank) -> tuple[float, bool, Any]:
    process, pipe = rank
    try:
        moment, ok, answer = _unpack(pipe.recv_bytes())
    except EOFError:
        process.join(5)
        return 0.0, False, f"died without a word, exit code {process.exitcode}"
    return moment, ok, answer


def _reap(ranks: list[Rank], grace: float) -> None:
    for _, pipe in ranks:
        pipe.close()  # a rank that has answered waits for this
    running = [process for process, _ in ranks if process.pid is not None]
    _join(running, grace)
    for stop in (ForkServerProcess.terminate, ForkServerProcess.kill):
        for process in running:
            if process.is_alive():
                stop(process)
        _join(running, 2)
    for process, _ in ranks:
        process.close()


def _join(processes: list[ForkServerProcess], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))


def _rank(rank: int, world: int, folder: str, job: bytes, pipe: Connection) -> None:
    """The body of one process. It answers first and tidies up later: others may be waiting."""
    torch.set_num_threads(1)
    try:
        function, args = _unpack(job)
        dist.init_process_group(
            "gloo",
            init_method=Path(folder, "rendezvous").as_uri(),
            rank=rank,
            world_size=world,
            timeout=PATIENCE,
        )
        answer = _pack((time.monotonic(), True, function(rank, world, *args)))
    except BaseException:
        answer = _pack((time.monotonic(), False, traceback.format_exc()))
    pipe.send_bytes(answer)
    with suppress(EOFError, OSError):
        pipe.recv_bytes()  # nothing comes but the end: who left earlier would tear connections that others still make
    pipe.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def _pack(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpack(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)
