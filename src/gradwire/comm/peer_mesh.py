"""Peers: swaps over plain TCP between neighbors, who may die, stall and come back.

A process group ends with its first dead member; here each pair of neighbors has a connection of its own. The higher
rank dials, again and again while there is none. Both say who they are and at which step they will talk next; the lower
rank then offers a step from which on the edge takes part, and the higher takes it, or refuses one that it has passed.
So both ends agree on the first step of an edge, and neither waits for a letter that was never written. Offers carry a
mark of what an end remembers of the edge, after a checkpoint was loaded; where both are equal, the edge is not new.

While a rank waits for one neighbor it tells the others so; who neither writes nor says that he waits for `timeout`
seconds is dropped. Its threads connect anew, but agree to nothing before its caller stirs again: else everybody would
wait for a rank that hangs, over and over. `frame` says what crosses the wire.
"""

import contextlib
import logging
import math
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait

from gradwire.comm.collectives import Traffic
from gradwire.comm.framing import FRAME, Edge, Kind, receive, seconds, shut
from gradwire.comm.rendezvous import Rendezvous

_REDIAL_SECONDS = 0.05
_FAREWELL_SECONDS = 0.3
OFF_THE_RECORD = 2**31  # legs from here on are not counted: what is said in them is no part of training
Snapshot = Callable[[], bytes]
_log = logging.getLogger("gradwire.gossip")


class PeerMesh:
    """One rank's connections. Threads read; everything else happens in the caller's.

    Attributes:
        rank: Who I am.
        timeout: Seconds after which a silent neighbor is dropped. A step waits for twice as long at most, since a
            neighbor that says that it waits itself is not silent.
        traffic: Bytes that crossed this rank's connections, frames included.
        lost: Neighbors whose edge took part and was lost, one entry each time.
    """

    def __init__(
        self,
        rank: int,
        neighbors: Iterable[int],
        meeting: Rendezvous,
        digest: bytes,
        *,
        timeout: float,
        host: str = "127.0.0.1",
    ) -> None:
        self.rank, self.timeout, self.traffic = rank, timeout, Traffic()
        self.lost: list[int] = []
        self._strangers: set[int] = set()  # who came with another training, so that it is said once
        self._neighbors, self._meeting, self._digest = tuple(neighbors), meeting, digest
        self._edges: dict[int, Edge] = {}
        self._dialing: set[int] = set()
        self._next = 0  # the step that I will talk in next
        self._settled = False  # whether I know that
        self._newcomer = True  # whether I never did
        self._deadline = math.inf  # when the step ends, with whoever has answered
        self._stirred = 0.0  # when the caller was last seen; infinite while it waits in here
        self._snapshot: tuple[int, Snapshot] | None = None
        self._marks: tuple[int, Mapping[int, bytes]] = (-1, {})  # what I remember of edges, at the step that it fits
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
        """Wait for the neighbors, at most `timeout`. Returns a peer that is further than ``step``, if there is one.

        A neighbor that has settled for an earlier step is waited for as well: it may be about to load its state.
        """

        def here() -> bool:
            ready = [edge for edge in self._live() if edge.ready is None or edge.ready >= step]
            return len(ready) == len(self._neighbors) or self._ahead(step) is not None

        with self._changed:
            self._next = step
            self._until(here)
            return self._ahead(step)

    def await_peer(self, peer: int) -> bool:
        """Wait until a neighbor is there, at most `timeout`."""
        with self._changed:
            self._until(lambda: peer in self._edges)
            return peer in self._edges

    def pull(self, peer: int) -> tuple[int, bytes] | None:
        """A peer's next step and parameters; None if it was lost meanwhile."""
        with self._changed:
            edge = self._edges.get(peer)
            if edge is not None:
                edge.state = None  # an earlier answer is out of date
        if edge is None or not self._send(edge, Kind.PULL):
            return None
        with self._changed:
            self._until(lambda: edge.state is not None or not edge.alive)
            return edge.state

    def settle(self, step: int, snapshot: Snapshot, marks: Mapping[int, bytes] | None = None) -> None:
        """I will talk in ``step`` next; let neighbors join me. Waits until those who are there have.

        Args:
            step: In which I talk next.
            snapshot: My parameters.
            marks: What I remember of the edge to each neighbor. These are waited for, there or not.
        """
        with self._changed:
            self._next, self._snapshot, self._settled, self._newcomer = step, (step, snapshot), True, False
            self._marks = step, marks or {}
            edges = list(self._edges.values())
        self._answer(edges)
        with self._here(edges), self._changed:
            self._until(lambda: self._all_begin(marks or {}))

    def show(self, step: int, snapshot: Snapshot) -> None:
        """Neighbors may have these parameters, though I do not talk yet."""
        with self._changed:
            self._snapshot = step, snapshot
            edges = list(self._edges.values())
        self._answer(edges)

    def _answer(self, edges: Iterable[Edge]) -> None:
        """Hand my parameters to those who asked before I had any."""
        for edge in edges:
            with self._changed:
                snapshot = self._snapshot if edge.asks else None
                edge.asks = edge.asks and snapshot is None
            if snapshot is not None:
                self._send(edge, Kind.STATE, snapshot[0], 0, snapshot[1]())

    def begin(self, step: int) -> dict[int, bool]:
        """Who takes part in a step, and whether the edge is new in it: a kept one goes on as it was."""
        with self._changed:
            self._next, self._deadline = step + 1, time.monotonic() + 2 * self.timeout
            unsettled = [edge for edge in self._live() if edge.start is None]
        with self._here(unsettled), self._changed:
            # An offer that I have reached must be answered first: the other end may have taken it.
            self._until(lambda: not any(_pending(edge, step) for edge in self._live()))
            for edge in [edge for edge in self._live() if _pending(edge, step)]:
                self._drop(edge)
            there = [edge for edge in self._live() if edge.start is not None and edge.start <= step]
            return {e.peer: e.start == step and not e.kept for e in sorted(there, key=lambda edge: edge.peer)}

    def swap(self, step: int, leg: int, out: Mapping[int, bytes]) -> dict[int, bytes]:
        """Hand each peer its letter and wait for theirs. A peer that is lost is absent from the answer."""
        with self._changed:
            edges = {peer: self._edges[peer] for peer in out if peer in self._edges and self._edges[peer].alive}
        if leg >= OFF_THE_RECORD:  # outside of any step
            self._deadline = time.monotonic() + 2 * self.timeout
        # By other threads: a stalled peer must not keep me from telling the others that I wait.
        letters = {
            peer: self._writers.submit(self._send, edge, Kind.LETTER, step, leg, out[peer])
            for peer, edge in edges.items()
        }
        with self._here():
            self._await_letters(edges.values(), step, leg)
            # Whoever answered reads; so my own letters are soon out, and counted.
            late = max(0.0, self._deadline - time.monotonic())
            wait([letter for peer, letter in letters.items() if edges[peer].alive], late)
        with self._changed:
            return {p: e.letters.pop((step, leg)) for p, e in edges.items() if (step, leg) in e.letters}

    def _await_letters(self, edges: Collection[Edge], step: int, leg: int) -> None:
        began = told = time.monotonic()
        while self._waits(edges, step, leg, began):
            if time.monotonic() - told >= self.timeout / 5:
                told = time.monotonic()
                for edge in edges:
                    self._writers.submit(self._send, edge, Kind.WAIT, step)

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
            left = [edge for edge in self._live() if edge.start is not None or edge.offered is not None]
            for edge in self._live():
                edge.told, edge.start, edge.tries = False, None, 0
        for edge in left:
            self._send(edge, Kind.BYE)  # nothing is lost, at either end
        with self._changed:
            for edge in left:
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
                if now > min(max(edge.heard, began) + self.timeout, self._deadline):
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

    def _all_begin(self, awaited: Iterable[int]) -> bool:
        live = {edge.peer: edge.start is not None for edge in self._live()}
        return bool(live) and all(live.values()) and all(peer in live for peer in awaited)

    def _mark(self, edge: Edge, step: int) -> bytes:
        """What I remember of an edge, if it is to go on with a step that this fits."""
        return self._marks[1].get(edge.peer, b"") if self._marks[0] == step else b""

    def _ahead(self, step: int) -> int | None:
        reached = [(max(edge.ready or 0, edge.start or 0), edge.peer) for edge in self._live()]
        further = [pair for pair in reached if pair[0] > step]
        return max(further)[1] if further else None

    def _drop(self, edge: Edge) -> None:
        if edge.alive:
            edge.alive = False
            if edge.start is not None:
                self.lost.append(edge.peer)
            shut(edge.line)
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
            line.sendall(FRAME.pack(Kind.HELLO, self._next if self._agrees() else -1, 0, len(hello)) + hello)
            kind, step, _, body = receive(line)
            if kind != Kind.HELLO:
                raise ConnectionError
            self._count(Traffic(FRAME.size + len(hello), FRAME.size + len(body), 0), 0)
        except (OSError, ConnectionError, struct.error):
            shut(line)
            return
        (peer,) = struct.unpack_from("<I", body)
        if peer not in self._neighbors or (dialed is not None and dialed != peer):
            shut(line)
            return
        line.settimeout(None)  # from now on silence is judged by whoever waits for letters
        line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds(self.timeout))
        edge = Edge(peer, line, ready=step if step >= 0 else None)
        if body[4:] != self._digest:
            self._refuse(peer)
            shut(line)
            return
        with self._changed:
            old = self._edges.get(peer)
            if old is not None:
                self._drop(old)  # the peer dials anew only when it has lost the line, or its memory
            self._edges[peer] = edge
            self._changed.notify_all()
        if self._agrees():
            self._tell([edge])
        self._read(edge)

    def _agrees(self) -> bool:
        """Whether the caller is there to keep what its threads agree to."""
        return self._settled and time.monotonic() < self._stirred + self.timeout / 2

    @contextlib.contextmanager
    def _here(self, edges: Iterable[Edge] = ()) -> Iterator[None]:
        """The caller is there; these edges may hear of it."""
        self._stirred = math.inf
        try:
            self._tell(edges)
            yield
        finally:
            self._stirred = time.monotonic()

    def _tell(self, edges: Iterable[Edge]) -> None:
        """Say which step I will talk in next, once, and offer one to begin with."""
        for edge in edges:
            if not edge.told:
                edge.told = True
                self._send(edge, Kind.READY, self._next)
            self._offer(edge)

    def _refuse(self, peer: int) -> None:
        """A stranger stops who is about to join it; those who train already do without it."""
        said = (
            f"rank {peer} trains something else than rank {self.rank}; start both with the same model, method, codec "
            "and seed"
        )
        with self._changed:
            if self._newcomer:
                self._complaint = said
                self._changed.notify_all()
            elif peer not in self._strangers:
                self._strangers.add(peer)
                _log.warning("%s. Going on without it.", said)

    def _read(self, edge: Edge) -> None:
        try:
            while edge.alive:
                kind, step, leg, body = receive(edge.line)
                self._count(Traffic(0.0, FRAME.size + len(body), 0), leg)
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
                edge.start, edge.offered, edge.kept = step, None, bool(body)
            take = kind == Kind.OFFER and self._settled and step >= self._next
            if take:
                edge.start, edge.kept = step, bool(body) and body == self._mark(edge, step)
            edge.asks = edge.asks or kind == Kind.PULL
            self._changed.notify_all()
        if kind in (Kind.READY, Kind.REFUSE):
            self._offer(edge)
        elif kind == Kind.OFFER:
            answer = (Kind.TAKE, step) if take else (Kind.REFUSE, self._next)
            self._send(edge, *answer, body=body if take and edge.kept else b"")
        elif kind == Kind.PULL:
            self._answer([edge])

    def _offer(self, edge: Edge) -> None:
        """The lower rank offers the first step that neither has passed, a little further after each refusal."""
        with self._changed:
            known = self._agrees() and edge.ready is not None and edge.alive and edge.start is None
            if not known or self.rank > edge.peer or edge.offered is not None:
                return
            assert edge.ready is not None
            edge.offered = max(self._next, edge.ready) + (2**edge.tries - 1)
            edge.tries = min(edge.tries + 1, 6)
            step, mark = edge.offered, self._mark(edge, edge.offered)
        self._send(edge, Kind.OFFER, step, body=mark)

    def _count(self, traffic: Traffic, leg: int) -> None:
        if leg < OFF_THE_RECORD:
            with self._counting:
                self.traffic += traffic

    def _send(self, edge: Edge, kind: Kind, step: int = 0, leg: int = 0, body: bytes = b"") -> bool:
        try:
            with edge.writing:
                edge.line.sendall(FRAME.pack(kind, step, leg, len(body)) + body)
            self._count(Traffic(FRAME.size + len(body), 0.0, 0), leg)
            return True
        except OSError:
            with self._changed:
                self._drop(edge)
            return False


def _pending(edge: Edge, step: int) -> bool:
    return edge.offered is not None and edge.offered <= step
