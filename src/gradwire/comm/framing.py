"""Frame: what crosses a connection between two peers, and what one end remembers of it.

Wire, little-endian:

    kind     uint8
    step     int64
    leg      uint32   which swap of the step
    length   uint64   of what follows
"""

import contextlib
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from enum import IntEnum

FRAME = struct.Struct("<BqIQ")
_MOST_BYTES = 2**36


class Kind(IntEnum):
    """What a frame is."""

    HELLO = 1  # step: my next; body: rank and digest of what I train
    READY = 2  # step: my next, now that I know it
    OFFER = 3  # step: from which the edge may take part; body: the mark of what I remember of it, if I do
    TAKE = 4  # step: as offered; body: the same mark, if I remember the same
    REFUSE = 5  # step: my next, which is beyond
    LETTER = 6  # step, leg; body: a payload
    WAIT = 7  # I wait for somebody else
    PULL = 8  # what are your parameters?
    STATE = 9  # step: my next; body: parameters
    BYE = 10  # I leave; nothing is lost


@dataclass
class Edge:
    """A connection to one peer."""

    peer: int
    line: socket.socket
    alive: bool = True
    ready: int | None = None  # the peer's next step, as it last said
    told: bool = False  # whether I have told it mine
    offered: int | None = None
    tries: int = 0
    start: int | None = None  # the first step in which the edge takes part
    kept: bool = False  # whether both ends remember the same of an earlier life of it
    heard: float = field(default_factory=time.monotonic)
    letters: dict[tuple[int, int], bytes] = field(default_factory=dict)
    state: tuple[int, bytes] | None = None
    asks: bool = False  # whether the peer waits for my parameters, which I do not have yet
    writing: threading.Lock = field(default_factory=threading.Lock)


def receive(line: socket.socket) -> tuple[int, int, int, bytes]:
    kind, step, leg, length = FRAME.unpack(_exactly(line, FRAME.size))
    if length > _MOST_BYTES:
        raise ConnectionError(f"a frame of {length} bytes is none of ours")
    return kind, step, leg, _exactly(line, length)


def _exactly(line: socket.socket, n: int) -> bytes:
    parts, left = [], n
    while left:
        part = line.recv(min(left, 2**20))
        if not part:
            raise ConnectionError("the line ended")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def seconds(timeout: float) -> bytes:
    """A struct timeval."""
    return struct.pack("ll", int(timeout), int(timeout % 1 * 1e6))


def shut(line: socket.socket) -> None:
    with contextlib.suppress(OSError):
        line.shutdown(socket.SHUT_RDWR)
    line.close()
