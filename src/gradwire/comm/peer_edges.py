"""Edges: the connections of one rank to its peers, what their frames mean, and the bytes that cross them."""

import struct
import threading
import time
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from enum import IntEnum

from gradwire.comm.collectives import Traffic
from gradwire.comm.secure_channel import SecureChannel, frame_bytes

UNCOUNTED = 2**31  # exchanges from this index on are not counted: they are no part of training
_READ_SECONDS = 1.0  # for the end of an older connection; that to a peer whose network was lost has none
MOST_MESSAGES = 64  # that wait to be used; neighbors are at most an exchange apart
BROKEN_CONNECTION = (OSError, ConnectionError, struct.error)


class FrameKind(IntEnum):
    """What a frame is. Steps and bodies are the sender's."""

    HELLO = 1  # step: its next one, or -1; body: its rank, and the digest of its training
    READY = 2  # step: its next one, now that it is known
    OFFER = 3  # step: from which the edge may take part; index: its next one; body: the digest of its copies, if any
    TAKE = 4  # step: as offered; body: the same digest, if its own is equal
    REFUSE = 5  # step: its next one, which is beyond the offered one, or -1 where it has not joined
    MESSAGE = 6  # step, index; body: a payload
    WAIT = 7  # it waits for another peer
    PULL = 8  # step: from which on it asks for parameters
    STATE = 9  # step: its next one; body: its parameters
    LEAVE = 10  # it leaves; nothing is lost
    ASK = 11  # it asks for the next step
    ANSWER = 12  # step: its next one, or -1 where it has not joined


@dataclass
class Edge:
    """One end of a connection.

    Attributes:
        peer: The rank at the other end.
        channel: The connection.
        alive: Until it is dropped.
        peer_step: The peer's next step, as it last announced it.
        announced: Whether this end has announced its own.
        offered: The step that this end has offered, until it is taken or refused.
        tries: How many offers were made.
        start: The first step in which the edge takes part, once both ends agree.
        resumed: Whether both ends have the same copies of an earlier life of the edge.
        messages: Received ones, by step and index, until they are used.
        state: The peer's next step and parameters, after a PULL.
        asked: Whether this end has asked for the peer's next step.
        answer: That step, or -1, once the peer has answered; or a later one that it has announced since.
        wanted: The step whose parameters the peer waits for, or those of a later one.
    """

    peer: int
    channel: SecureChannel
    alive: bool = True
    peer_step: int | None = None
    announced: bool = False
    offered: int | None = None
    tries: int = 0
    start: int | None = None
    resumed: bool = False
    messages: dict[tuple[int, int], bytes] = field(default_factory=dict)
    state: tuple[int, bytes] | None = None
    asked: bool = False
    answer: int | None = None
    wanted: int | None = None

    @property
    def last_seen(self) -> float:
        """When the last bytes came."""
        return self.channel.last_read

    @property
    def reached(self) -> int:
        """The latest step of the peer that is known; 0 where none is."""
        return max(self.peer_step or 0, self.answer or 0)


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

    def taking_part(self, step: int) -> list[Edge]:
        return [edge for edge in self.live() if edge.start is not None and edge.start <= step]

    def is_cut_off(self, step: int) -> bool:
        """Whether no edge takes part in a step."""
        return not self.taking_part(step)

    def is_left_behind(self, step: int) -> bool:
        """Whether some peer is further, and no edge takes part in a step."""
        return self.is_cut_off(step) and self.furthest(step) is not None

    def furthest(self, step: int) -> int | None:
        """The peer that is furthest beyond a step, if there is one."""
        further = [(edge.reached, edge.peer) for edge in self.live() if edge.reached > step]
        return max(further)[1] if further else None

    def undecided(self, step: int, peers: Set[int]) -> list[Edge]:
        """The edges to some peers that may still be agreed on for a step, which neither end has passed."""
        waiting = [edge for edge in self.live() if edge.start is None and edge.peer in peers]
        return [edge for edge in waiting if edge.answer == edge.reached == step]

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Wait for a condition, at most `timeout`.

        Raises:
            ValueError: A thread has found an error.
        """
        self.changed.wait_for(lambda: self.error is not None or holds(), self.timeout)
        if self.error is not None:
            raise ValueError(self.error)

    def await_state(self, edge: Edge) -> bool:
        """Wait for parameters, at most `timeout`, and then as long as they arrive. Returns whether they did."""

        def is_over() -> bool:
            return edge.state is not None or not edge.alive

        self.wait_until(is_over)
        while not is_over() and edge.channel.amid_frame and time.monotonic() < edge.last_seen + self.timeout:
            self.changed.wait_for(is_over, self.timeout / 10)
        return edge.state is not None

    # -- without it ----------------------------------------------------------------------------------------------------

    def snapshot(self) -> list[Edge]:
        """All edges at this moment."""
        with self.changed:
            return list(self.by_peer.values())

    def add(self, edge: Edge) -> None:
        """Enter a new connection in place of an older one: a peer dials again only when it has left or lost that.

        The older one's thread first reads what the peer has sent over it, a LEAVE perhaps. A connection whose handshake
        outlasts this rank ends: its peer would hold on to it, and not dial this rank's successor.
        """
        with self.changed:
            while (old := self.by_peer.get(edge.peer)) is not None:
                self.changed.wait_for(lambda: not old.alive, _READ_SECONDS)
                self.drop(old)
            self.by_peer[edge.peer] = edge
            if self.closed:
                self.drop(edge)
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

    # -- questions of a rank that was cut off --------------------------------------------------------------------------

    def ask_steps(self, step: int, awaited: Set[int], until_further: bool = True) -> bool:
        """Ask all peers for their next steps. Returns whether one is further, and none takes part in the step.

        What a peer has announced may be out of date, since it announces its step once for each edge. Its threads answer
        questions at any time, also while its caller computes. Peers that connect meanwhile are asked, too. Those that
        are awaited need not be there yet. One that is silent for `timeout` seconds is dropped.

        Args:
            step: Of this rank.
            awaited: Peers that are waited for, there or not.
            until_further: Whether one peer that is further, or takes part in the step, is enough.
        """
        deadline = time.monotonic() + self.timeout
        with self.changed:
            for edge in self.live():
                edge.asked, edge.answer = False, None
        while unasked := self._await_answers(step, awaited, deadline, until_further):
            for edge in unasked:
                edge.asked = True
                self.send(edge, FrameKind.ASK)
        with self.changed:
            return self.is_left_behind(step)

    def _await_answers(self, step: int, awaited: Set[int], deadline: float, until_further: bool) -> list[Edge]:
        """Wait for answers until enough is known. Returns the edges that are there but not asked yet."""

        def is_settled() -> bool:
            if until_further and (self.furthest(step) is not None or not self.is_cut_off(step)):
                return True
            return all(edge.answer is not None for edge in self.live()) and awaited <= self.by_peer.keys()

        def unasked() -> list[Edge]:
            return [] if is_settled() else [edge for edge in self.live() if not edge.asked]

        with self.changed:
            if not self.changed.wait_for(lambda: is_settled() or unasked(), deadline - time.monotonic()):
                for edge in [edge for edge in self.live() if edge.answer is None]:
                    self.drop(edge)
            return unasked()
