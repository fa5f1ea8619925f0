"""Roll call: who can still be reached, when a collective has failed.

A process group ends with its first lost member, and its error names nobody. So every rank keeps a door that nobody ever
enters: a socket that listens. Others knock when a collective has failed. That it answers shows that its rank is alive
and its host within reach; that it is gone shows that the rank has ended; and silence, that one of the two hosts is down
or cut off.
"""

import atexit
import errno
import os
import re
import selectors
import socket
import time
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

SECONDS = 3.0  # until a door that has not answered is taken to be out of reach
_PAUSES = (0.2, 1.0)  # a process that ends closes its sockets one after the other, and the door may not be the first
_BREAKS = re.compile(r"tim(ed|e) ?out|connection|closed|broken pipe|unreachable|no route|socket", re.IGNORECASE)


class PeerLostError(RuntimeError):
    """A collective failed; the message names the ranks that no longer answer, and their hosts."""


class ProbeAddress(NamedTuple):
    """Where a rank can be knocked at. An address of "" is not known."""

    host: str
    address: str
    port: int


Book = Mapping[int, ProbeAddress]  # by rank, in the numbers that people see


def door() -> ProbeAddress:
    """This process's own."""
    listener = _listener(os.getpid())
    address, port = listener.getsockname() if listener is not None else ("", 0)
    name = socket.gethostname() if not address or address.startswith("127.") else address
    return ProbeAddress(name, address, port)


def lost(wrong: RuntimeError, me: int, book: Book, seconds: float = SECONDS) -> RuntimeError:
    """The error to raise instead of a collective's own, where that is the network's."""
    if not _BREAKS.search(str(wrong)):
        return wrong
    others = {rank: where for rank, where in book.items() if rank != me and where.address}
    answers: dict[int, int] = {}
    for pause in _PAUSES:
        time.sleep(pause)
        answers = probe(others, seconds)
        if any(answers.values()):
            break
    gone = [rank for rank, number in answers.items() if number == errno.ECONNREFUSED]
    silent = [rank for rank, number in answers.items() if number not in (0, errno.ECONNREFUSED)]
    told = []
    if gone:
        told.append(f"{_named(gone, book)} ended")
    if silent:
        here = book[me].host if me in book else "here"
        told.append(f"{_named(silent, book)} cannot be reached from {here}: a host is down or cut off")
    if not told:
        told.append("all ranks are there, but one came too late, or they asked different things")
    return PeerLostError(f"a collective failed on rank {me}: {'; '.join(told)} ({_reason(wrong)})")


def probe(doors: Book, seconds: float) -> dict[int, int]:
    """By rank: 0 where the door is there, else the error number; a door that never answers has timed out."""
    found = dict.fromkeys(doors, errno.ETIMEDOUT)
    deadline = time.monotonic() + seconds
    with selectors.DefaultSelector() as waiting:
        for rank, where in doors.items():
            knocker = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            knocker.setblocking(False)
            found[rank] = knocker.connect_ex((where.address, where.port))
            if found[rank] == errno.EINPROGRESS:
                found[rank] = errno.ETIMEDOUT
                waiting.register(knocker, selectors.EVENT_WRITE, rank)
            else:
                knocker.close()
        while waiting.get_map() and time.monotonic() < deadline:
            for key, _ in waiting.select(deadline - time.monotonic()):
                assert isinstance(key.fileobj, socket.socket)
                found[key.data] = key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                waiting.unregister(key.fileobj)
                key.fileobj.close()
        for key in list(waiting.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
    return found


def _named(ranks: list[int], book: Book) -> str:
    hosts: dict[str, list[str]] = {}
    for rank in ranks:
        hosts.setdefault(book[rank].host, []).append(str(rank))
    return ", ".join(f"rank {' and '.join(numbers)} on {host}" for host, numbers in hosts.items())


def _reason(wrong: RuntimeError) -> str:
    """What the transport says, without where in its source it says so."""
    first = str(wrong).splitlines()[0]
    return re.sub(r"^\[[^\]]*\] ", "", first).partition(". This is")[0]


@lru_cache(maxsize=1)
def _listener(process: int) -> socket.socket | None:
    """One for each process, as long as it lives; a forked child has none of its own yet."""
    del process
    try:
        address = _address()
        made = socket.create_server((address, 0), backlog=64) if address else None
    except OSError:
        return None
    if made is not None:
        atexit.register(made.close)
    return made


def _address() -> str:
    """The address from which this host reaches the meeting place; its own loopback where all ranks are on one host."""
    place = os.environ.get("MASTER_ADDR")
    if not place:
        return "127.0.0.1"
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((place, 1))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return ""
