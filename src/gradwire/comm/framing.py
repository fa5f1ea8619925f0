"""Frames: what crosses a connection between two peers, and the state that one end keeps of it.

Wire, little-endian:

    kind     uint8
    step     int64
    index    uint32   which exchange of the step
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
UNCOUNTED = 2**31  # exchanges from this index on are not counted: they are no part of training
_MOST_BYTES = 2**36


class FrameKind(IntEnum):
    """What a frame is. Steps and bodies are the sender's."""

    HELLO = 1  # step: its next one, or -1; body: its rank, and the digest of its training
    READY = 2  # step: its next one, now that it is known
    OFFER = 3  # step: from which the edge may take part; body: the digest of its copies of the edge, if it has any
    TAKE = 4  # step: as offered; body: the same digest, if its own is equal
    REFUSE = 5  # step: its next one, which is beyond the offered one
    MESSAGE = 6  # step, index; body: a payload
    WAIT = 7  # it waits for another peer
    PULL = 8  # it asks for parameters
    STATE = 9  # step: its next one; body: its parameters
    LEAVE = 10  # it leaves; nothing is lost


@dataclass
class Edge:
    """One end of a connection.

    Attributes:
        peer: The rank at the other end.
        line: The connection.
        alive: Until it is dropped.
        peer_step: The peer's next step, as it last announced it.
        announced: Whether this end has announced its own.
        offered: The step that this end has offered, until it is taken or refused.
        tries: How many offers were made.
        start: The first step in which the edge takes part, once both ends agree.
        resumed: Whether both ends have the same copies of an earlier life of the edge.
        last_seen: When the last frame came.
        messages: Received ones, by step and index, until they are used.
        state: The peer's next step and parameters, after a PULL.
        wants_state: Whether the peer waits for this end's parameters, which are not there yet.
        write_lock: Held while a frame is written.
    """

    peer: int
    line: socket.socket
    alive: bool = True
    peer_step: int | None = None
    announced: bool = False
    offered: int | None = None
    tries: int = 0
    start: int | None = None
    resumed: bool = False
    last_seen: float = field(default_factory=time.monotonic)
    messages: dict[tuple[int, int], bytes] = field(default_factory=dict)
    state: tuple[int, bytes] | None = None
    wants_state: bool = False
    write_lock: threading.Lock = field(default_factory=threading.Lock)


def pack_frame(kind: FrameKind, step: int = 0, index: int = 0, body: bytes = b"") -> bytes:
    return FRAME.pack(kind, step, index, len(body)) + body


def receive_frame(line: socket.socket) -> tuple[int, int, int, bytes]:
    """The next frame: kind, step, index and body."""
    kind, step, index, length = FRAME.unpack(_receive_exactly(line, FRAME.size))
    if length > _MOST_BYTES:
        raise ConnectionError(f"a frame of {length} bytes is too long; close the connection")
    return kind, step, index, _receive_exactly(line, length)


def _receive_exactly(line: socket.socket, n: int) -> bytes:
    parts, left = [], n
    while left:
        part = line.recv(min(left, 2**20))
        if not part:
            raise ConnectionError("the connection ended")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def timeval(seconds: float) -> bytes:
    """A struct timeval."""
    return struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))


def shut(line: socket.socket) -> None:
    with contextlib.suppress(OSError):
        line.shutdown(socket.SHUT_RDWR)
    line.close()
