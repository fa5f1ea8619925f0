"""Peers: swaps over plain TCP between neighbors, who may die, stall and come back.

A process group ends with its first dead member; here each pair of neighbors has a connection of its own. The higher
rank dials, again and again while there is none. Both say who they are and at which step they will talk next; the lower
rank then offers a step from which on the edge takes part, and the higher takes it, or refuses one that it has passed.
So both ends agree on the first step of an edge, and neither waits for a letter that was never written.

While a rank waits for one neighbor it tells the others so; who neither writes nor says that he waits for `timeout`
seconds is dropped. Frames, little-endian:

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
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import IntEnum

from gradwire.links.collectives import Traffic
from gradwire.links.meeting import Meeting

_FRAME = struct.Struct("<BqIQ")
_MOST_BYTES = 2**36
_REDIAL_SECONDS = 0.05
_FAREWELL_SECONDS = 0.3
OFF_THE_RECORD = 2**31  # legs from here on are not counted: what is said in them is no part of training
Snapshot = Callable[[], bytes]


class Kind(IntEnum):
    """What a frame is."""

    HELLO = 1  # step: my next; body: rank and digest of what I train
    READY = 2  # step: my next, now that I know it
    OFFER = 3  # step: from which the edge may take part
    TAKE = 4  # step: as offered
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
    offered: int | None = None
    tries: int = 0
    start: int | None = None  # the first step in which the edge takes part
    heard: float = field(default_factory=time.monotonic)
    letters: dict[tuple[int, int], bytes] = field(default_factory=dict)
    state: tuple[int, bytes] | None = None
    writing: threading.Lock = field(default_factory=threading.Lock)


class Peers:
    """One rank's connections. Threads read; everything else happens in the caller's.

    Attributes:
        rank: Who I am.
        timeout: Seconds after which a silent neighbor is dropped.
        traffic: Bytes that crossed this rank's connections, frames included.
        dropped: How many times a neighbor was lost.
        joined: How many times an edge began to take part.
    """

    def __init__(
        self,
        rank: int,
        neighbors: Iterable[int],
        meeting: Meeting,
        digest: bytes,
        *,
        timeout: float,
        host: str = "127.0.0.1",
    ) -> None:
        self.rank, self.timeout, self.traffic = rank, timeout, Traffic()
        self.dropped = self.joined = 0
        self._neighbors, self._meeting, self._digest = tuple(neighbors), meeting, digest
        self._edges: dict[int, Edge] = {}
        self._dialing: set[int] = set()
        self._next = 0  # the step that I will talk in next
        self._settled = False  # whether I know that
        self._snapshot: tuple[int, Snapshot] | None = None
        self._complaint: str | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._counting = threading.Lock()
        self._writers = ThreadPoolExecutor(2 * len(self._neighbors) + 1, "gradwire-writer")
        self._listener = socket.create_server((host, 0))
        meeting.write(rank, (host, self._listener.getsockname()[1]))
        for work in (self._accept, self._dial):
            threading.Thread(target=work, name=f"gradwire-{work.__name__}", daemon=True).start()

    # -- what the caller does ------------------------------------------------------------------------------------------

    def meet(self, step: int) -> int | None:
        """Wait for the neighbors, at most `timeout`. Returns a peer that is further than ``step``, if there is one."""
        with self._changed:
            self._next = step
            self._until(lambda: len(self._live()) == len(self._neighbors) or self._ahead(step) is not None)
            return self._ahead(step)

    def pull(self, peer: int) -> tuple[int, bytes] | None:
        """A peer's next step and parameters; None if it was lost meanwhile."""
        with self._changed:
            edge = self._edges.get(peer)
        if edge is None or not self._send(edge, Kind.PULL):
            return None
        with self._changed:
            self._until(lambda: edge.state is not None or not edge.alive)
            return edge.state

    def settle(self, step: int, snapshot: Snapshot) -> None:
        """I will talk in ``step`` next; let neighbors join me. Waits until those who are there have."""
        with self._changed:
            self._next, self._snapshot, self._settled = step, (step, snapshot), True
            edges = list(self._edges.values())
        for edge in edges:
            self._send(edge, Kind.READY, step)
            self._offer(edge)
        with self._changed:
            self._until(lambda: bool(self._live()) and all(edge.start is not None for edge in self._live()))

    def begin(self, step: int) -> dict[int, bool]:
        """Who takes part in a step, and whether the edge is new in it."""
        with self._changed:
            self._next = step + 1
            # An offer that I have reached must be answered first: the other end may have taken it.
            self._until(lambda: not any(_pending(edge, step) for edge in self._live()))
            for edge in [edge for edge in self._live() if _pending(edge, step)]:
                self._drop(edge)
            present = {e.peer: e.start == step for e in self._live() if e.start is not None and e.start <= step}
            self.joined += sum(present.values())
            return dict(sorted(present.items()))

    def swap(self, step: int, leg: int, out: Mapping[int, bytes]) -> dict[int, bytes]:
        """Hand each peer its letter and wait for theirs. A peer that is lost is absent from the answer."""
        with self._changed:
            edges = {peer: self._edges[peer] for peer in out if peer in self._edges and self._edges[peer].alive}
        for peer, edge in edges.items():
            # By other threads: a stalled peer must not keep me from telling the others that I wait.
            self._writers.submit(self._send, edge, Kind.LETTER, step, leg, out[peer])
        began = told = time.monotonic()
        while self._waits(edges.values(), step, leg, began):
            if time.monotonic() - told >= self.timeout / 5:
                told = time.monotonic()
                for edge in edges.values():
                    self._writers.submit(self._send, edge, Kind.WAIT, step)
        with self._changed:
            return {p: e.letters.pop((step, leg)) for p, e in edges.items() if (step, leg) in e.letters}

    def done(self, step: int, snapshot: Snapshot) -> None:
        """The step is over; who comes back may start from these parameters."""
        with self._changed:
            self._snapshot = (step + 1, snapshot)

    def left_behind(self, step: int, slack: int) -> bool:
        """Whether some peer is more than ``slack`` steps ahead of me, and no edge begins sooner."""
        with self._changed:
            soon = any(edge.start is not None and edge.start <= step + slack for edge in self._live())
            return not soon and self._ahead(step + slack) is not None

    def hang_up(self) -> None:
        """Leave all edges that have a first step, and agree to none until `settle` is called again."""
        with self._changed:
            self._settled = False
            for edge in self._live():
                if edge.start is not None or edge.offered is not None:
                    self._drop(edge)

    def close(self) -> None:
        """Leave, after the last letter is out."""
        with self._changed:
            self._closed = True
            edges = self._live()
            self._changed.notify_all()
        self._writers.shutdown()
        for edge in edges:
            if self._send(edge, Kind.BYE):
                with contextlib.suppress(OSError):
                    edge.line.shutdown(socket.SHUT_WR)
        with self._changed:
            # Closing on unread bytes would reset the line, and destroy what the other end has not read yet.
            self._changed.wait_for(lambda: not self._live(), _FAREWELL_SECONDS)
            for edge in self._live():
                self._drop(edge)
        # A blocked accept holds the listening socket open; a connection of our own wakes it.
        with contextlib.suppress(OSError):
            socket.create_connection(self._listener.getsockname(), timeout=1).close()
        self._listener.close()

    def _waits(self, edges: Iterable[Edge], step: int, leg: int, began: float) -> bool:
        """Drop who was silent too long; wait a little for the others. Whether any letter is still to come."""
        with self._changed:
            now = time.monotonic()
            waiting = [edge for edge in edges if edge.alive and (step, leg) not in edge.letters]
            for edge in waiting:
                if now > max(edge.heard, began) + self.timeout or now > began + 2 * self.timeout:
                    self._drop(edge)
            if any(edge.alive for edge in waiting):
                self._changed.wait(self.timeout / 10)
                return True
            return False

    # -- inside, with the lock held ------------------------------------------------------------------------------------

    def _until(self, holds: Callable[[], bool]) -> None:
        """Wait for a condition, at most `timeout`; raise what a reader found wrong."""
        self._changed.wait_for(lambda: self._complaint is not None or holds(), self.timeout)
        if self._complaint is not None:
            raise ValueError(self._complaint)

    def _live(self) -> list[Edge]:
        return [edge for edge in self._edges.values() if edge.alive]

    def _ahead(self, step: int) -> int | None:
        reached = [(max(edge.ready or 0, edge.start or 0), edge.peer) for edge in self._live()]
        further = [pair for pair in reached if pair[0] > step]
        return max(further)[1] if further else None

    def _drop(self, edge: Edge) -> None:
        if edge.alive:
            edge.alive = False
            self.dropped += edge.start is not None
            _shut(edge.line)
            if self._edges.get(edge.peer) is edge:
                del self._edges[edge.peer]
            self._changed.notify_all()

    # -- connections ---------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._closed:
            try:
                line, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._greet, args=(line, None), daemon=True).start()

    def _dial(self) -> None:
        while not self._closed:
            for peer in self._neighbors:
                if peer < self.rank and peer not in self._edges and peer not in self._dialing and not self._closed:
                    self._dialing.add(peer)
                    threading.Thread(target=self._call, args=(peer,), daemon=True).start()
            with self._changed:
                self._changed.wait_for(lambda: self._closed, _REDIAL_SECONDS)

    def _call(self, peer: int) -> None:
        """Dial a peer, if it can be found. A second call while one is under way would end the first."""
        address = self._meeting.read(peer)
        with contextlib.suppress(OSError):
            if address is not None:
                self._greet(socket.create_connection(address, timeout=self.timeout), peer)
        self._dialing.discard(peer)

    def _greet(self, line: socket.socket, dialed: int | None) -> None:
        """Exchange hellos, then read until the end. Runs in the edge's own thread."""
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line.settimeout(self.timeout)
        try:
            hello = struct.pack("<I", self.rank) + self._digest
            line.sendall(_FRAME.pack(Kind.HELLO, self._next if self._settled else -1, 0, len(hello)) + hello)
            kind, step, _, body = _receive(line)
            if kind != Kind.HELLO:
                raise ConnectionError
        except (OSError, ConnectionError, struct.error):
            _shut(line)
            return
        (peer,) = struct.unpack_from("<I", body)
        if peer not in self._neighbors or (dialed is not None and dialed != peer):
            _shut(line)
            return
        line.settimeout(None)  # from now on silence is judged by whoever waits for letters
        line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _seconds(self.timeout))
        edge = Edge(peer, line, ready=step if step >= 0 else None)
        with self._changed:
            if body[4:] != self._digest:
                self._complaint = (
                    f"rank {peer} trains something else than rank {self.rank}; start both with the same model, method, "
                    "codec and seed"
                )
            old = self._edges.get(peer)
            if old is not None:
                self._drop(old)  # the peer dials anew only when it has lost the line, or its memory
            self._edges[peer] = edge
            self._changed.notify_all()
        if self._settled:
            self._send(edge, Kind.READY, self._next)
            self._offer(edge)
        self._read(edge)

    def _read(self, edge: Edge) -> None:
        try:
            while edge.alive:
                kind, step, leg, body = _receive(edge.line)
                self._count(Traffic(0.0, _FRAME.size + len(body), 0), leg)
                self._heard(edge, kind, step, leg, body)
        except (OSError, ConnectionError, struct.error):
            with self._changed:
                self._drop(edge)

    def _heard(self, edge: Edge, kind: int, step: int, leg: int, body: bytes) -> None:
        with self._changed:
            edge.heard = time.monotonic()
            if kind == Kind.LETTER:
                edge.letters[step, leg] = body
            elif kind == Kind.BYE:
                edge.start = None
            elif kind == Kind.STATE:
                edge.state = step, body
            elif kind == Kind.READY:
                edge.ready = step
            elif kind == Kind.REFUSE:
                edge.ready, edge.offered = step, None
            elif kind == Kind.TAKE and edge.offered == step:
                edge.start, edge.offered = step, None
            take = kind == Kind.OFFER and self._settled and step >= self._next
            if take:
                edge.start = step
            snapshot = self._snapshot
            self._changed.notify_all()
        if kind in (Kind.READY, Kind.REFUSE):
            self._offer(edge)
        elif kind == Kind.OFFER:
            self._send(edge, Kind.TAKE if take else Kind.REFUSE, step if take else self._next)
        elif kind == Kind.PULL and snapshot is not None:
            self._send(edge, Kind.STATE, snapshot[0], 0, snapshot[1]())

    def _offer(self, edge: Edge) -> None:
        """The lower rank offers the first step that neither has passed, a little further after each refusal."""
        with self._changed:
            known = self._settled and edge.ready is not None and edge.alive and edge.start is None
            if not known or self.rank > edge.peer or edge.offered is not None:
                return
            assert edge.ready is not None
            edge.offered = max(self._next, edge.ready) + (2**edge.tries - 1)
            edge.tries = min(edge.tries + 1, 6)
            step = edge.offered
        self._send(edge, Kind.OFFER, step)

    def _count(self, traffic: Traffic, leg: int) -> None:
        if leg < OFF_THE_RECORD:
            with self._counting:
                self.traffic += traffic

    def _send(self, edge: Edge, kind: Kind, step: int = 0, leg: int = 0, body: bytes = b"") -> bool:
        try:
            with edge.writing:
                edge.line.sendall(_FRAME.pack(kind, step, leg, len(body)) + body)
            self._count(Traffic(_FRAME.size + len(body), 0.0, 0), leg)
            return True
        except OSError:
            with self._changed:
                self._drop(edge)
            return False


def _pending(edge: Edge, step: int) -> bool:
    return edge.offered is not None and edge.offered <= step


def _receive(line: socket.socket) -> tuple[int, int, int, bytes]:
    kind, step, leg, length = _FRAME.unpack(_exactly(line, _FRAME.size))
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


def _seconds(timeout: float) -> bytes:
    """A struct timeval."""
    return struct.pack("ll", int(timeout), int(timeout % 1 * 1e6))


def _shut(line: socket.socket) -> None:
    with contextlib.suppress(OSError):
        line.shutdown(socket.SHUT_RDWR)
    line.close()
