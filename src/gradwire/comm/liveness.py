"""Liveness: which ranks can still be reached, when a collective has failed.

A process group ends with its first lost member, and its error names no rank. So every rank keeps a listening socket,
and the others try to connect to it when a collective has failed. A connection shows that the rank is alive and its host
is reachable; a refusal, that the rank has ended; no answer, that one of the two hosts is down or cut off. No byte is
read or sent: each connection is accepted and closed.
"""

import atexit
import errno
import os
import re
import socket
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import NamedTuple

from gradwire.comm.secure_channel import accept_all, listen, shut

SECONDS = 3.0  # until a rank that has not answered is taken to be out of reach
_PAUSES = (0.2, 1.0)  # a process that ends closes its sockets one after the other, and the listener may be late
_MOST_PROBES = 256  # at a time
_NETWORK_ERROR = re.compile(r"tim(ed|e) ?out|connection|closed|broken pipe|unreachable|no route|socket", re.IGNORECASE)


class PeerLostError(RuntimeError):
    """A collective failed; the message names the ranks that no longer answer, and their hosts."""


class ProbeAddress(NamedTuple):
    """Where a rank listens for probes. An address of "" is not known."""

    host: str
    address: str
    port: int


ProbeAddresses = Mapping[int, ProbeAddress]  # by rank, in the numbers that people see


def probe_address() -> ProbeAddress:
    """This process's own."""
    listener = _listener(os.getpid())
    address, port = listener.getsockname() if listener is not None else ("", 0)
    name = socket.gethostname() if not address or address.startswith("127.") else address
    return ProbeAddress(name, address, port)


def diagnose(error: RuntimeError, me: int, addresses: ProbeAddresses, seconds: float = SECONDS) -> RuntimeError:
    """The error to raise instead of a collective's own, where that is the network's."""
    if not _NETWORK_ERROR.search(str(error)):
        return error
    others = {rank: where for rank, where in addresses.items() if rank != me and where.address}
    answers: dict[int, int] = {}
    for pause in _PAUSES:
        time.sleep(pause)
        answers = probe(others, seconds)
        if any(answers.values()):
            break
    ended = [rank for rank, number in answers.items() if number == errno.ECONNREFUSED]
    silent = [rank for rank, number in answers.items() if number not in (0, errno.ECONNREFUSED)]
    causes = [f"{_named(ended, addresses)} ended"] if ended else []
    if silent:
        here = addresses[me].host if me in addresses else "here"
        causes.append(f"{here} cannot reach {_named(silent, addresses)}: a host is down or cut off")
    text = "; ".join(causes) or "all ranks answer, but one was too late, or they called different collectives"
    return PeerLostError(f"a collective failed on rank {me}: {text} ({_reason(error)})")


def probe(addresses: ProbeAddresses, seconds: float) -> dict[int, int]:
    """By rank: 0 where it listens, else the error number of the connection."""

    def connect(where: ProbeAddress) -> int:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as line:
            line.settimeout(seconds)
            return line.connect_ex((where.address, where.port))

    with ThreadPoolExecutor(_MOST_PROBES) as threads:
        return dict(zip(addresses, threads.map(connect, addresses.values()), strict=True))


def _named(ranks: list[int], addresses: ProbeAddresses) -> str:
    hosts: dict[str, list[str]] = {}
    for rank in ranks:
        hosts.setdefault(addresses[rank].host, []).append(str(rank))
    return ", ".join(f"rank {' and '.join(numbers)} on {host}" for host, numbers in hosts.items())


def _reason(error: RuntimeError) -> str:
    """The transport's own reason, without the place in its source."""
    first = str(error).splitlines()[0]
    return re.sub(r"^\[[^\]]*\] ", "", first).partition(". This is")[0]


@lru_cache(maxsize=1)
def _listener(process: int) -> socket.socket | None:
    """One for each process, as long as it lives; a forked child needs its own."""
    try:
        listener = listen(_address())
    except OSError:
        return None
    atexit.register(shut, listener)
    # Connections that are not accepted would fill the queue, and a living rank would no longer answer.
    threading.Thread(
        target=accept_all, args=(listener, socket.socket.close), name="gradwire-probes", daemon=True
    ).start()
    return listener


def _address() -> str:
    """The address from which this host reaches the rendezvous; its loopback where all ranks are on one host."""
    rendezvous = os.environ.get("MASTER_ADDR")
    if not rendezvous:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
        line.connect((rendezvous, 1))  # sends nothing
        return str(line.getsockname()[0])
