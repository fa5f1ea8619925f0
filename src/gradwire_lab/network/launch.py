"""One command in many ranks: started together, read together, and ended together."""

import math
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from gradwire_lab.parent_watch import set_signal_of_parents_end
from gradwire_lab.signals import signals_deferred

Sink = Callable[[int, str], None]  # (rank, line)

_KILL_SECONDS = 2.0  # between the polite request to end and the other one
_TICK_SECONDS = 0.05

# Unless the user says otherwise. Addresses of hosts have no names, of which torch would warn at every connection.
DEFAULTS = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
FIRST_PORT = 29500


class Ended(NamedTuple):
    """How a run ended.

    Attributes:
        codes: Exit codes by rank; a negative one is the signal that ended it.
        why: Empty when every rank ended well, else a sentence that names the host.
        code: One exit code for all: 0, that of the first rank to fail, or 124 after the time limit.
    """

    codes: tuple[int, ...]
    why: str
    code: int


@dataclass
class RankProcess:
    """A running process; its output still without the end of the line."""

    title: str
    process: "subprocess.Popen[bytes]"
    unfinished: bytes = b""


def place(rank: int, per_host: int, num_hosts: int, meeting: tuple[str, int], device: str) -> dict[str, str]:
    """The variables that give a rank its number and the address of the rendezvous."""
    host, local = divmod(rank, per_host)
    address, port = meeting
    found = {
        "RANK": rank,
        "WORLD_SIZE": num_hosts * per_host,
        "LOCAL_RANK": local,
        "LOCAL_WORLD_SIZE": per_host,
        "GROUP_RANK": host,
        "GROUP_WORLD_SIZE": num_hosts,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "GLOO_SOCKET_IFNAME": device,
        "NCCL_SOCKET_IFNAME": device,
        "TP_SOCKET_IFNAME": device,
        # read by torchrun, should it be the command
        "PET_NNODES": num_hosts,
        "PET_NODE_RANK": host,
        "PET_MASTER_ADDR": address,
        "PET_MASTER_PORT": port,
    }
    return {name: str(value) for name, value in found.items()}


class RankProcesses:
    """The ranks of one run."""

    def __init__(self, sink: Sink) -> None:
        self.ranks: list[RankProcess] = []
        self.sink = sink

    def start(self, title: str, argv: list[str], env: Mapping[str, str], cwd: str | None) -> None:
        """Start one more rank, in a session of its own; it dies when this process does.

        A signal waits until the rank is known, so that `close` finds it. Nor would it arrive earlier: what handlers
        raise while Python forks goes no further than that.
        """
        with signals_deferred():
            process = subprocess.Popen(
                argv,
                env=env,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=partial(set_signal_of_parents_end, signal.SIGKILL),
            )
            self.ranks.append(RankProcess(title, process))
        assert process.stdout
        os.set_blocking(process.stdout.fileno(), False)

    def wait(
        self,
        timeout_seconds: float | None,
        grace_seconds: float,
        network_fault: Callable[[], str],
        network_gone: Callable[[], bool],
    ) -> Ended:
        """Forward what the ranks say until all have ended.

        Args:
            timeout_seconds: The whole run may take this long; None for no limit.
            grace_seconds: After one rank failed, the others may take this long to end by themselves.
            network_fault: Asked when something went wrong: a sentence about the network, or nothing.
            network_gone: Asked all the time: whether the network is gone, so that there is nothing to wait for.
        """
        deadline = math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds
        why, code = "", 0
        with selectors.DefaultSelector() as pipes:
            for number, rank in enumerate(self.ranks):
                assert rank.process.stdout
                pipes.register(rank.process.stdout, selectors.EVENT_READ, number)
            while running := self._running():
                self._forward(pipes, _TICK_SECONDS)
                if not code:
                    why, code = self._failure()
                    deadline = min(deadline, time.monotonic() + grace_seconds) if code else deadline
                if not code and network_gone():
                    why, code, deadline = "The ranks still running were stopped.", 1, -math.inf
                if time.monotonic() > deadline:
                    if not code:
                        titles = ", ".join(rank.title for rank in running)
                        why, code = f"The run was stopped after {timeout_seconds:g} s; still running: {titles}.", 124
                    self._end(pipes)
            self._forward(pipes, 0)
        if not code:
            why, code = self._failure()
        if code:
            why = " ".join(filter(None, (network_fault(), why)))
        return Ended(tuple(rank.process.wait() for rank in self.ranks), why, code)

    def close(self) -> None:
        """Kill what still runs; say the lines that never ended."""
        self._signal(signal.SIGKILL)
        for number, rank in enumerate(self.ranks):
            rank.process.wait()
            assert rank.process.stdout
            rank.process.stdout.close()
            if rank.unfinished:
                self.sink(number, _text(rank.unfinished))

    def _running(self) -> list[RankProcess]:
        return [rank for rank in self.ranks if rank.process.poll() is None]

    def _failure(self) -> tuple[str, int]:
        """How the first rank that failed ended, and the exit code of a shell; nothing if none failed."""
        failed = next((rank for rank in self.ranks if rank.process.poll()), None)
        if failed is None:
            return "", 0
        code = failed.process.returncode
        how = f"exited with code {code}" if code > 0 else f"was ended by {signal.Signals(-code).name}"
        return f"{failed.title} {how}, and the ranks still running were stopped.", code if code > 0 else 128 - code

    def _end(self, pipes: selectors.BaseSelector) -> None:
        self._signal(signal.SIGTERM)
        kill_at = time.monotonic() + _KILL_SECONDS
        while self._running() and time.monotonic() < kill_at:
            self._forward(pipes, _TICK_SECONDS)
        self._signal(signal.SIGKILL)
        for rank in self.ranks:
            rank.process.wait()

    def _signal(self, number: signal.Signals) -> None:
        for rank in self._running():  # not reaped yet, so the id is still theirs
            os.killpg(rank.process.pid, number)

    def _forward(self, pipes: selectors.BaseSelector, seconds: float) -> None:
        for key, _ in pipes.select(seconds):
            try:
                data = os.read(key.fd, 1 << 16)
            except BlockingIOError:
                continue
            if not data:
                pipes.unregister(key.fileobj)
            rank = self.ranks[key.data]
            *lines, rank.unfinished = (rank.unfinished + data).split(b"\n")
            for line in lines:
                self.sink(key.data, _text(line))


def _text(line: bytes) -> str:
    return line.decode(errors="replace").rstrip("\r")
