"""Connector: opens connections to neighbors, again and again while there is none, and answers theirs."""

import contextlib
import logging
import socket
import struct
import threading
from collections.abc import Callable, Iterable
from typing import Any

from gradwire.comm.collectives import Traffic
from gradwire.comm.framing import FRAME, Edge, FrameKind, pack_frame, receive_frame, shut, timeval
from gradwire.comm.peer_agreement import EdgeAgreement
from gradwire.comm.peer_edges import BROKEN_CONNECTION
from gradwire.comm.rendezvous import Rendezvous

_REDIAL_SECONDS = 0.05
_log = logging.getLogger("gradwire.gossip")


class Connector:
    """Threads that accept and dial, and one thread for each edge, which reads until the connection ends."""

    def __init__(
        self, agreement: EdgeAgreement, neighbors: Iterable[int], rendezvous: Rendezvous, digest: bytes, host: str
    ) -> None:
        self._rank, self._edges, self._agreement = agreement.rank, agreement.edges, agreement
        self._neighbors, self._rendezvous = tuple(neighbors), rendezvous
        self._hello = struct.pack("<I", self._rank) + digest
        self._refused: set[int] = set()  # peers of another training, which are logged once
        self._listener = socket.create_server((host, 0))
        rendezvous.write(self._rank, (host, self._listener.getsockname()[1]))
        _start(self._accept)
        for peer in self._neighbors:
            if peer < self._rank:  # the higher rank of an edge dials
                _start(self._dial, peer)

    def close(self) -> None:
        """Stop to accept. The edges are closed already."""
        # A blocked accept holds the listening socket open; a connection of our own wakes it.
        with contextlib.suppress(OSError):
            socket.create_connection(self._listener.getsockname(), timeout=1).close()
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the listener was closed
            while not self._edges.closed:
                _start(self._serve, self._listener.accept()[0], None)

    def _dial(self, peer: int) -> None:
        """Connect to a peer whose address is known, again and again while there is no connection."""
        edges = self._edges
        while not edges.closed:
            address = self._rendezvous.read(peer) if peer not in edges.by_peer else None
            with contextlib.suppress(OSError):
                if address is not None:
                    self._serve(socket.create_connection(address, timeout=edges.timeout), peer)
            with edges.changed:
                edges.changed.wait_for(lambda: edges.closed, _REDIAL_SECONDS)

    def _serve(self, line: socket.socket, dialed: int | None) -> None:
        """Exchange hellos, then read until the end. Runs in the edge's own thread."""
        try:
            edge, same_training = self._greet(line)
        except BROKEN_CONNECTION:
            shut(line)
            return
        if not same_training or edge.peer not in self._neighbors or dialed not in (None, edge.peer):
            if edge.peer in self._neighbors and not same_training:
                self._refuse(edge.peer)
            shut(line)
            return
        self._edges.add(edge)
        if self._agreement.is_active():
            self._agreement.announce([edge])
        self._edges.read(edge, self._agreement.handle)

    def _greet(self, line: socket.socket) -> tuple[Edge, bool]:
        """Exchange hellos. Returns the edge, and whether its peer has the same training."""
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line.settimeout(self._edges.timeout)
        next_step = self._agreement.next_step if self._agreement.is_active() else -1
        line.sendall(pack_frame(FrameKind.HELLO, next_step, body=self._hello))
        kind, step, _, body = receive_frame(line)
        if kind != FrameKind.HELLO:
            raise ConnectionError
        self._edges.count(Traffic(FRAME.size + len(self._hello), FRAME.size + len(body), 0))
        (peer,) = struct.unpack_from("<I", body)
        line.settimeout(None)  # from now on, silence is judged where messages are waited for
        line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval(self._edges.timeout))
        return Edge(peer, line, peer_step=step if step >= 0 else None), body[4:] == self._hello[4:]

    def _refuse(self, peer: int) -> None:
        """A peer of another training is an error for a rank that is about to join; a joined rank ignores it."""
        message = (
            f"rank {peer} trains something else than rank {self._rank}; start both with the same model, method, codec "
            "and seed"
        )
        with self._edges.changed:
            if not self._agreement.joined_before:
                self._edges.error = message
                self._edges.changed.notify_all()
            elif peer not in self._refused:
                self._refused.add(peer)
                _log.warning("%s. Going on without it.", message)


def _start(work: Callable[..., None], *args: Any) -> None:
    threading.Thread(target=work, args=args, name=f"gradwire-{work.__name__}", daemon=True).start()
