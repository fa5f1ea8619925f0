"""Launch: N ranks on this machine, each a process that calls one Python function, in a process group of their own.

Ranks are forked from a server that has imported torch already, so they start in a tenth of a second. No rank outlives
the call, whether a rank fails or the caller is interrupted or killed.
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
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gradwire.comm import emulated, job_secret
from gradwire.core import plugins
from gradwire_lab.descriptors import check_descriptors
from gradwire_lab.launcher_env import LauncherRank
from gradwire_lab.parent_watch import LAUNCHER, end_with_launcher
from gradwire_lab.quiet_tracker import start_quiet_tracker
from gradwire_lab.signals import signals_deferred

PRELOAD = ("torch", "torch.distributed", "numpy", "gradwire")
TIMEOUT = datetime.timedelta(minutes=5)  # of one collective
GRACE_SECONDS = 3.0  # after a failure: how long to wait for the rank that caused it to report
KILL_SECONDS = 30.0  # after SIGKILL: how long to wait for ranks to be gone, where other work holds the cores

_context = multiprocessing.get_context("forkserver")
_launcher: Connection | None = None  # in a rank: the pipe to the process that launched it


class RankError(RuntimeError):
    """A rank raised, or died; the message names it."""


class LaunchedRank(NamedTuple):
    """A running rank, and the launcher's end of its pipe."""

    process: ForkServerProcess
    pipe: Connection


def launch(
    function: Callable[..., Any],
    world: int,
    *args: Any,
    on_message: Callable[[int, Any], None] | None = None,
    backend: str = "gloo",
    timeout: datetime.timedelta = TIMEOUT,
    restarts: int = 0,
    on_restart: Callable[[int, str], None] | None = None,
    limit_seconds: float | None = None,
    grace_seconds: float = GRACE_SECONDS,
    threads: int | None = None,
    prepare: Callable[[int], object] | None = None,
) -> list[Any]:
    """Call ``function(rank, world, *args)`` in every rank of a new process group.

    Args:
        function: At the top level of a module, so that a fresh process can import it.
        world: How many ranks.
        args: Copied to every rank.
        on_message: Called here with (rank, message) for each message that a rank passes to `send_message`.
        backend: ``gloo`` or ``nccl``; empty: no process group is made.
        timeout: How long a rank waits for others in a collective.
        restarts: How often a rank that died is started again, before all are stopped.
        on_restart: Called here with (rank, why) when a rank is started again.
        limit_seconds: How long the whole call may take; None: without limit.
        grace_seconds: After a failure, how long to wait for other ranks to report theirs.
        threads: Of torch in every rank; None: see `threads_per_rank`.
        prepare: Called in every rank with its number, before the group is made.

    Returns:
        What each rank returned, in rank order. With ``restarts``, None of a rank that fails when others have returned.

    Raises:
        RankError: A rank raised or died; the others were stopped.
        TimeoutError: Ranks were stopped at ``limit_seconds``.
    """
    if world < 1:
        raise ValueError(f"cannot launch {world} ranks; give at least one")
    check_descriptors(world)
    preload(function.__module__)
    variables = {name: os.environ.get(name, "") for name in (emulated.VARIABLE, plugins.VARIABLE)}
    variables |= job_secret.secret_variable()
    job = pickle.dumps((function, args, backend, timeout, threads or threads_per_rank(world), variables, prepare))
    with tempfile.TemporaryDirectory() as folder, _started(world, job, folder) as ranks:
        left = dict.fromkeys(range(world), restarts)

        def restart(rank: int, why: str) -> bool:
            if left[rank] == 0:
                return False
            left[rank] -= 1
            if on_restart is not None:
                on_restart(rank, why)
            ranks[rank].pipe.close()
            ranks[rank] = _start(rank, world, job, folder)
            return True

        return _collect(ranks, on_message, restart if restarts else None, limit_seconds, grace_seconds)


def send_message(message: Any) -> None:
    """From within a rank: send a message to its launcher. In other processes it does nothing."""
    if _launcher is not None:
        _launcher.send_bytes(pickle.dumps(("message", time.monotonic(), message)))


def preload(*modules: str) -> None:
    """Name what the fork server imports beforehand. It starts, and freezes its environment, at first use."""
    # Some virtual machines advertise AMX without its tiles: a bfloat16 matmul would die with SIGILL.
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
    start_quiet_tracker()
    os.environ[LAUNCHER] = str(os.getpid())
    names = [*PRELOAD, *(name for name in modules if name != "__main__")]
    _context.set_forkserver_preload(["gradwire_lab.preload_begins", *names, "gradwire_lab.preload_ends"])


@contextmanager
def join_group(
    where: LauncherRank, backend: str, timeout: datetime.timedelta = TIMEOUT, rendezvous: datetime.timedelta = TIMEOUT
) -> Iterator[None]:
    """Join the process group of the ranks that torchrun, mpirun or srun has started, and leave it at the end.

    torchrun's agent keeps one store through all its restarts, with the addresses of ranks that died. So every attempt
    has a prefix of its own.

    Args:
        where: This rank.
        backend: ``gloo`` or ``nccl``.
        timeout: How long a rank waits for others in a collective.
        rendezvous: How long it tries to reach the store of rank 0.
    """
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
    is_master = where.rank == 0 and not where.has_agent_store
    options: dict[str, Any] = {"master_listen_fd": where.listen() if is_master else None, "wait_for_workers": False}
    store = dist.TCPStore(where.address, where.port, is_master=is_master, timeout=rendezvous, **options)  # type: ignore[attr-defined]
    own = dist.PrefixStore(f"gradwire-{where.attempt}", store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=own, rank=where.rank, world_size=where.world, timeout=timeout)
    try:
        yield
    finally:
        dist.destroy_process_group()


def threads_per_rank(world: int) -> int:
    """How many threads each of ``world`` ranks on this machine should use: its share, unless OMP_NUM_THREADS says."""
    given = os.environ.get("OMP_NUM_THREADS", "")  # set by torchrun, too
    return int(given) if given.isdigit() and int(given) else max(1, usable_cores() // world)


def usable_cores() -> int:
    """How many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# -- in the launcher ---------------------------------------------------------------------------------------------------


@contextmanager
def _started(world: int, job: bytes, folder: str) -> Iterator[list[LaunchedRank]]:
    ranks: list[LaunchedRank] = []
    grace_seconds = 0.0
    try:
        for rank in range(world):
            with signals_deferred():
                ranks.append(_start(rank, world, job, folder))
        yield ranks
        grace_seconds = 5.0
    finally:
        _stop(ranks, grace_seconds)


def _start(rank: int, world: int, job: bytes, folder: str) -> LaunchedRank:
    ours, theirs = _context.Pipe()
    process = _context.Process(target=_rank, args=(rank, world, folder, job, theirs), daemon=True)
    with closing(theirs):  # or a rank's death would not show as the end of its pipe
        process.start()
    return LaunchedRank(process, ours)


def _collect(
    ranks: list[LaunchedRank],
    on_message: Callable[[int, Any], None] | None,
    restart: Callable[[int, str], bool] | None,
    limit_seconds: float | None,
    grace_seconds: float,
) -> list[Any]:
    running = {pipe: rank for rank, (_, pipe) in enumerate(ranks)}
    results: dict[int, Any] = {}
    failures: list[tuple[float, int, str]] = []  # the time (0: the rank died), the rank, and why
    deadline = None if limit_seconds is None else time.monotonic() + limit_seconds
    while running:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = wait(list(running), grace_seconds if failures else left)
        if not ready and not failures:
            late = ", ".join(map(str, sorted(running.values())))
            raise TimeoutError(f"no result within {limit_seconds:g} s from rank {late} of {len(ranks)}")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = running[pipe]
            what, moment, value = _receive(ranks[rank])
            if what == "message":
                if on_message is not None:
                    on_message(rank, value)
                continue
            del running[pipe]
            if what == "result":
                results[rank] = value
            elif restart is not None and results:
                results[rank] = None  # the others are done: there is no group to come back to
            elif restart is not None and moment == 0.0 and restart(rank, value):  # it died
                running[ranks[rank].pipe] = rank
            else:
                failures.append((moment, rank, value))
        # The others often fail because of the first, whose own report, or death, may arrive after theirs.
        if failures and (not ready or min(failures)[0] == 0.0):
            break
    if failures:
        _, rank, why = min(failures)
        raise RankError(f"rank {rank} of {len(ranks)} {why}")
    return [results[rank] for rank in range(len(ranks))]


def _receive(rank: LaunchedRank) -> tuple[str, float, Any]:
    try:
        what, moment, value = pickle.loads(rank.pipe.recv_bytes())
    except (OSError, EOFError):  # amid a message, and between two
        rank.process.join(30)  # the exit code comes from the fork server, a little later
        code = rank.process.exitcode
        cause = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        return "failure", 0.0, f"died without a result: {cause}"
    return what, moment, value


def _stop(ranks: list[LaunchedRank], grace_seconds: float) -> None:
    for _, pipe in ranks:
        pipe.close()  # a rank that has sent its result waits for this
    processes = [process for process, _ in ranks]
    _join(processes, grace_seconds)
    for stop, seconds in ((ForkServerProcess.terminate, 2.0), (ForkServerProcess.kill, KILL_SECONDS)):
        for process in processes:
            if process.is_alive():
                stop(process)
        _join(processes, seconds)
    for process in processes:
        if not process.is_alive():  # a rank may be gone only later, which must not hide why all were stopped
            process.close()


def _join(processes: list[ForkServerProcess], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))


# -- in a rank ---------------------------------------------------------------------------------------------------------


def _rank(rank: int, world: int, folder: str, job: bytes, pipe: Connection) -> None:
    """The body of one process. It sends its result before it cleans up, because other ranks may be waiting."""
    global _launcher
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher handles Ctrl-C, and stops its ranks
    end_with_launcher(pipe)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are here; the host's name need not resolve
    _launcher = pipe
    try:
        function, args, backend, timeout, threads, variables, prepare = pickle.loads(job)
        torch.set_num_threads(threads)
        # Over those of the fork server, which are those of its first use; all ranks are on this host.
        os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)} | variables
        if prepare is not None:
            prepare(rank)
        if backend:
            store = Path(folder, "rendezvous").as_uri()
            dist.init_process_group(backend, init_method=store, rank=rank, world_size=world, timeout=timeout)
        result = pickle.dumps(("result", time.monotonic(), function(rank, world, *args)))
    except BaseException:
        result = pickle.dumps(("failure", time.monotonic(), f"failed:\n{traceback.format_exc()}"))
    with suppress(EOFError, OSError):  # the launcher stops its ranks, or has ended
        pipe.send_bytes(result)
        pipe.recv_bytes()  # only its end comes: leaving earlier would break connections that others still make
    pipe.close()
    if dist.is_initialized():
        dist.destroy_process_group()
