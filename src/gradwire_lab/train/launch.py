"""Launch: N ranks on this machine, in a gloo group of their own.

Ranks are forked from a server that has imported torch already, so they start in a tenth of a second. Whatever happens,
to one of them or to the caller, none is left behind.
"""

import datetime
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gradwire.comm import emulated
from gradwire_lab.train.standing import Standing

PRELOAD = ("torch", "torch.distributed", "numpy", "gradwire")
PATIENCE = datetime.timedelta(minutes=5)  # of one collective
LAST_WORDS_SECONDS = 3.0  # after a failure, until nobody has spoken for so long

_context = multiprocessing.get_context("forkserver")
_home: Connection | None = None  # in a rank: the way to whoever launched it


class RankError(RuntimeError):
    """A rank raised, or died; the message names it."""


class Rank(NamedTuple):
    """A running process, and the end of its pipe that we hold."""

    process: ForkServerProcess
    pipe: Connection


class Failure(NamedTuple):
    """Why a rank gave no result. They sort by who failed first; one that died comes before all that only raised."""

    moment: float
    rank: int
    why: str


def launch(
    function: Callable[..., Any],
    world: int,
    *args: Any,
    hear: Callable[[int, Any], None] | None = None,
    backend: str = "gloo",
    patience: datetime.timedelta = PATIENCE,
    revivals: int = 0,
    mourn: Callable[[int, str], None] | None = None,
) -> list[Any]:
    """Call ``function(rank, world, *args)`` in every rank of a new group.

    Args:
        function: Lives at the top of a module, so that a fresh process can import it.
        world: How many ranks.
        args: Copied to every rank.
        hear: Called here with (rank, news) for whatever a rank passes to `tell`.
        backend: Who moves the bytes: ``gloo`` or ``nccl``; empty: ranks find each other by themselves.
        patience: How long a rank waits for others in a collective.
        revivals: How often a rank that died is started anew, before all are stopped.
        mourn: Called here with (rank, why) when one is.

    Returns:
        What each rank returned, in rank order. It crosses as bytes, so let it be plain. With ``revivals``, None of a
        rank that fails when others have returned.

    Raises:
        RankError: A rank raised or died; the others were stopped.
    """
    if world < 1:
        raise ValueError(f"cannot launch {world} ranks; ask for at least one")
    prepare(function.__module__)
    job = pickle.dumps((function, args, backend, patience, os.environ.get(emulated.VARIABLE, "")))
    with tempfile.TemporaryDirectory() as folder, _started(world, job, folder) as ranks:
        left = dict.fromkeys(range(world), revivals)

        def revive(rank: int, why: str) -> bool:
            left[rank] -= 1
            if left[rank] >= 0:
                if mourn is not None:
                    mourn(rank, why)
                ranks[rank].pipe.close()
                ranks[rank] = _start(rank, world, job, folder)
            return left[rank] >= 0

        return _collect(ranks, hear, revive if revivals else None)


def tell(news: Any) -> None:
    """From within a rank: send news to whoever launched it. Nobody hears it elsewhere."""
    if _home is not None:
        _home.send_bytes(pickle.dumps(("news", time.monotonic(), news)))


def prepare(*modules: str) -> None:
    """Tell the fork server what to import beforehand. It starts, and freezes its environment, at first use."""
    # Some virtual machines advertise AMX without its tiles: a bfloat16 matmul would die with SIGILL.
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
    _hush_tracker()
    _context.set_forkserver_preload([*PRELOAD, *(name for name in modules if name != "__main__")])


def _hush_tracker() -> None:
    """Start Python's tracker of semaphores, which clears away numba's of a rank that was stopped, without a word.

    It would end whatever we tell people with a warning that something leaks. Only its own environment is changed.
    """
    before = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, (before, "ignore:resource_tracker:UserWarning")))
    resource_tracker.ensure_running()
    del os.environ["PYTHONWARNINGS"]
    if before is not None:
        os.environ["PYTHONWARNINGS"] = before


@contextmanager
def joined(
    where: Standing, backend: str, patience: datetime.timedelta = PATIENCE, meeting: datetime.timedelta = PATIENCE
) -> Iterator[None]:
    """Take one's place in the group that torchrun, mpirun or srun has started, and leave it at the end.

    torchrun's agent keeps one store through all its restarts, in which the dead have left their addresses. So every
    attempt has names of its own.

    Args:
        where: The place.
        backend: Who moves the bytes.
        patience: How long a rank waits for others in a collective.
        meeting: How long it looks for the place where they meet.
    """
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
    keeps = where.rank == 0 and not where.hosted
    store = dist.TCPStore(where.address, where.port, is_master=keeps, timeout=meeting, wait_for_workers=False)  # type: ignore[attr-defined]
    names = dist.PrefixStore(f"gradwire-{where.attempt}", store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=names, rank=where.rank, world_size=where.world, timeout=patience)
    try:
        yield
    finally:
        dist.destroy_process_group()


def threads(world: int) -> int:
    """How many threads each of ``world`` ranks on this machine should use: its share, unless OMP_NUM_THREADS says."""
    told = os.environ.get("OMP_NUM_THREADS", "")  # torchrun sets it too, so what is measured under it must have as many
    if told.isdigit() and int(told):
        return int(told)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // world)


# -- the side that launches --------------------------------------------------------------------------------------------


@contextmanager
def _started(world: int, job: bytes, folder: str) -> Iterator[list[Rank]]:
    ranks: list[Rank] = []
    try:
        for rank in range(world):
            ranks.append(_start(rank, world, job, folder))
        yield ranks
        _reap(ranks, grace_seconds=5)
    except BaseException:
        _reap(ranks, grace_seconds=0)
        raise


def _start(rank: int, world: int, job: bytes, folder: str) -> Rank:
    ours, theirs = _context.Pipe()
    process = _context.Process(target=_rank, args=(rank, world, folder, job, theirs), daemon=True)
    with closing(theirs):  # or a rank's death would not show as the end of its pipe
        process.start()
    return Rank(process, ours)


def _collect(
    ranks: list[Rank], hear: Callable[[int, Any], None] | None, revive: Callable[[int, str], bool] | None
) -> list[Any]:
    silent = {one.pipe: rank for rank, one in enumerate(ranks)}
    results: dict[int, Any] = {}
    failures: list[Failure] = []
    while silent:
        ready = wait(list(silent), LAST_WORDS_SECONDS if failures else None)
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = silent[pipe]
            what, moment, value = _receive(ranks[rank])
            if what == "news":
                if hear is not None:
                    hear(rank, value)
                continue
            del silent[pipe]
            if what == "result":
                results[rank] = value
            elif revive is not None and results:
                results[rank] = None  # the others are done: there is nobody to come back to
            elif revive is not None and moment == 0.0 and revive(rank, value):  # it died
                silent[ranks[rank].pipe] = rank
            else:
                failures.append(Failure(moment, rank, value))
        # The others often fail because of the first, whose own word, or death, may reach us after theirs.
        if failures and (not ready or min(failures).moment == 0.0):
            break
    if failures:
        first = min(failures)
        raise RankError(f"rank {first.rank} of {len(ranks)} {first.why}")
    return [results[rank] for rank in range(len(ranks))]


def _receive(rank: Rank) -> tuple[str, float, Any]:
    try:
        what, moment, value = pickle.loads(rank.pipe.recv_bytes())
    except EOFError:
        rank.process.join(30)  # the fork server tells how it ended, when its turn comes
        return "failure", 0.0, f"died without a word: {_cause(rank.process.exitcode)}"
    return what, moment, value


def _cause(exitcode: int | None) -> str:
    if exitcode is None or exitcode >= 0:
        return f"exit code {exitcode}"
    return f"killed by {signal.Signals(-exitcode).name}"


def _reap(ranks: list[Rank], grace_seconds: float) -> None:
    for _, pipe in ranks:
        pipe.close()  # a rank that has answered waits for this
    running = [process for process, _ in ranks if process.pid is not None]
    _join(running, grace_seconds)
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


# -- the side of a rank ------------------------------------------------------------------------------------------------


def _rank(rank: int, world: int, folder: str, job: bytes, pipe: Connection) -> None:
    """The body of one process. It answers first and tidies up later: others may be waiting."""
    global _home
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the caller's affair, who will stop us
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are here; the host's name need not resolve
    torch.set_num_threads(threads(world))
    _home = pipe
    try:
        function, args, backend, patience, link = pickle.loads(job)
        os.environ.pop(emulated.VARIABLE, None)  # the fork server's, which is that of its first use
        emulated.ask_for(link)
        os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}  # all on this host
        if backend:
            store = Path(folder, "rendezvous").as_uri()
            dist.init_process_group(backend, init_method=store, rank=rank, world_size=world, timeout=patience)
        answer = pickle.dumps(("result", time.monotonic(), function(rank, world, *args)))
    except BaseException:
        answer = pickle.dumps(("failure", time.monotonic(), f"failed:\n{traceback.format_exc()}"))
    pipe.send_bytes(answer)
    with suppress(EOFError, OSError):
        pipe.recv_bytes()  # nothing comes but the end: who left earlier would tear connections that others still make
    pipe.close()
    if dist.is_initialized():
        dist.destroy_process_group()
