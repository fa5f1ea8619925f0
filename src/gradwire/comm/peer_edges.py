"""Edge table: the live connections of one rank, and the bytes that cross them."""

import struct
import threading
from collections.abc import Callable

from gradwire.comm.collectives import Traffic
from gradwire.comm.framing import UNCOUNTED, Edge, FrameKind
from gradwire.comm.secure_channel import frame_bytes

BROKEN_CONNECTION = (OSError, ConnectionError, struct.error)


class EdgeTable:
    """Edges by peer. `changed` guards them, and is notified of every change.

    Attributes:
        timeout: Seconds that `wait_until` waits at most.
        traffic: Bytes that crossed this rank's connections, frames included.
        lost: Neighbors whose edge took part and was lost, one entry each time.
        closed: Whether no edge may be added any more.
        error: What a thread found wrong; raised in the caller's.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout, self.traffic = timeout, Traffic()
        self.lost: list[int] = []
        self.closed = False
        self.error: str | None = None
        self.changed = threading.Condition()
        self.by_peer: dict[int, Edge] = {}
        self._counting = threading.Lock()

    # -- with `changed` held -------------------------------------------------------------------------------------------

    def live(self) -> list[Edge]:
        return [edge for edge in self.by_peer.values() if edge.alive]

    def drop(self, edge: Edge) -> None:
        """Close a connection. A neighbor is lost if the edge took part."""
        if edge.alive:
            edge.alive = False
            if edge.start is not None:
                self.lost.append(edge.peer)
            edge.channel.close()
            if self.by_peer.get(edge.peer) is edge:
                del self.by_peer[edge.peer]
            self.changed.notify_all()

    def is_cut_off(self, step: int) -> bool:
        """Whether no edge takes part in a step."""
        return not any(edge.start is not None and edge.start <= step for edge in self.live())

    def furthest(self, step: int) -> int | None:
        """The peer that is furthest beyond a step, if there is one."""
        reached = [(max(e.peer_step or 0, e.start or 0, e.answer or 0), e.peer) for e in self.live()]
        further = [pair for pair in reached if pair[0] > step]
        return max(further)[1] if further else None

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Wait for a condition, at most `timeout`.

        Raises:
            ValueError: A thread has found an error.
        """
        self.changed.wait_for(lambda: self.error is not None or holds(), self.timeout)
        if self.error is not None:
            raise ValueError(self.error)

    # -- without it ----------------------------------------------------------------------------------------------------

    def snapshot(self) -> list[Edge]:
        """All edges at this moment."""
        with self.changed:
            return list(self.by_peer.values())

    def add(self, edge: Edge) -> None:
        """Enter a new connection in place of an older one: a peer dials again only when it has lost that."""
        with self.changed:
            old = self.by_peer.get(edge.peer)
            if old is not None:
                self.drop(old)
            self.by_peer[edge.peer] = edge
            self.changed.notify_all()

    def send(self, edge: Edge, kind: FrameKind, step: int = 0, index: int = 0, body: bytes = b"") -> bool:
        """Write a frame; a connection that cannot be written to is dropped. Returns whether it was written."""
        try:
            edge.channel.send(kind, step, index, body)
            self.count(Traffic(frame_bytes(step, index, body), 0.0, 0), index)
            return True
        except OSError:
            with self.changed:
                self.drop(edge)
            return False

    def read(self, edge: Edge, handle: Callable[[Edge, int, int, int, bytes], None]) -> None:
        """Read frames until the connection ends."""
        try:
            while edge.alive:
                kind, step, index, body = edge.channel.receive()
                self.count(Traffic(0.0, frame_bytes(step, index, body), 0), index)
                handle(edge, kind, step, index, body)
        except BROKEN_CONNECTION:
            with self.changed:
                self.drop(edge)

    def count(self, traffic: Traffic, index: int = 0) -> None:
        if index < UNCOUNTED:
            with self._counting:
                self.traffic += traffic
