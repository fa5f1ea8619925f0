"""Connections that survive their other end: agreed steps, letters, and what becomes of the silent."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from gradwire.comm.peer_mesh import PeerMesh
from gradwire.comm.rendezvous import Folder, Store, meeting

TIMEOUT = 0.6
LINE = {0: [1], 1: [0, 2], 2: [1]}


@contextlib.contextmanager
def opened(folder: Path, *ranks: int, digest: bytes = b"same", timeout: float = TIMEOUT) -> Iterator[list[PeerMesh]]:
    made = [PeerMesh(rank, LINE[rank], Folder(folder), digest, timeout=timeout) for rank in ranks]
    try:
        yield made
    finally:
        for peers in made:
            peers.close()


def together(*work: Callable[[], Any]) -> list[Any]:
    """What each returns, all at once."""
    results: list[Any] = [None] * len(work)

    def run(i: int) -> None:
        results[i] = work[i]()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


def settled(peers: PeerMesh, step: int = 0) -> None:
    peers.meet(step)
    peers.settle(step, lambda: b"model")


def talked(peers: PeerMesh, step: int) -> tuple[dict[int, bool], dict[int, bytes]]:
    live = peers.begin(step)
    heard = peers.swap(step, 0, {peer: f"{peers.rank} at {step}".encode() for peer in live})
    peers.done(step, lambda: f"model after {step}".encode())
    return live, heard


def test_letters_arrive_and_edges_are_new_once(tmp_path: Path) -> None:
    with opened(tmp_path, 0, 1, 2) as (a, b, c):
        together(lambda: settled(a), lambda: settled(b), lambda: settled(c))
        for step in range(3):
            ours, theirs, _ = together(*(lambda p=p, step=step: talked(p, step) for p in (a, b, c)))
            assert ours == ({1: step == 0}, {1: f"1 at {step}".encode()})
            assert theirs[1] == {0: f"0 at {step}".encode(), 2: f"2 at {step}".encode()}
        assert not a.lost


def test_the_kernel_counts_the_same_bytes(tmp_path: Path) -> None:
    with opened(tmp_path, 0, 1, 2) as (a, b, c):
        together(lambda: settled(a), lambda: settled(b), lambda: settled(c))
        for step in range(3):
            together(*(lambda p=p, step=step: talked(p, step) for p in (a, b, c)))
        for peers in (a, b, c):
            assert peers.traffic.received == sum(_received(edge.line) for edge in peers._edges.values()) > 0
        assert a.traffic.sent == _received(b._edges[0].line) and c.traffic.sent == _received(b._edges[2].line)


def _received(line: socket.socket) -> int:
    """tcpi_bytes_received of Linux."""
    info = line.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
    return int.from_bytes(info[128:136], "little")


def test_who_dies_is_missed_at_once_and_who_leaves_is_not_lost(tmp_path: Path) -> None:
    with opened(tmp_path, 1, timeout=20.0) as (b,):
        with opened(tmp_path, 0, 2, timeout=20.0) as (a, c):
            together(lambda: settled(a), lambda: settled(b), lambda: settled(c))
            together(*(lambda p=p: talked(p, 0) for p in (a, b, c)))
            a._edges[1].line.shutdown(socket.SHUT_RDWR)  # what a killed process leaves behind
            a._closed = True
        began = time.monotonic()
        live, heard = talked(b, 1)
        assert heard == {} and time.monotonic() - began < 5.0
        assert b.begin(2) == {} and len(b.lost) == 1 and live.keys() <= {0}


def test_who_stalls_is_dropped_and_nobody_else(tmp_path: Path) -> None:
    """Rank 1 waits for the silent rank 2; rank 0 waits for rank 1, and is told so."""
    with opened(tmp_path, 0, 1, 2) as (a, b, c):
        together(lambda: settled(a), lambda: settled(b), lambda: settled(c))
        together(*(lambda p=p: talked(p, 0) for p in (a, b, c)))
        began = time.monotonic()
        (_, at_a), (_, at_b) = together(lambda: talked(a, 1), lambda: talked(b, 1))
        assert TIMEOUT * 0.8 < time.monotonic() - began < TIMEOUT * 2 + 1
        assert at_a == {1: b"1 at 1"} and at_b == {0: b"0 at 1"}
        assert (a.lost, b.lost) == ([], [2])


def test_who_comes_back_starts_from_a_neighbor_at_an_agreed_step(tmp_path: Path) -> None:
    with opened(tmp_path, 0, timeout=5.0) as (a,):
        with opened(tmp_path, 1, timeout=5.0) as (b,):
            b._neighbors = (0,)
            together(lambda: settled(a), lambda: settled(b))
            together(lambda: talked(a, 0), lambda: talked(b, 0))
        for step in range(1, 40):
            talked(a, step)
        with opened(tmp_path, 1, timeout=5.0) as (b,):
            b._neighbors = (0,)
            assert b.meet(0) == 0
            state = b.pull(0)
            assert state is not None and state[1] == f"model after {state[0] - 1}".encode()
            b.settle(state[0], lambda: b"")
            first = {}
            for step in range(state[0], state[0] + 6):
                (mine, _), (theirs, heard) = together(lambda s=step: talked(a, s), lambda s=step: talked(b, s))
                assert mine == {1: theirs[0]} if theirs else not mine
                if theirs:
                    first[step] = theirs[0]
                assert heard.keys() == theirs.keys()
            assert list(first.values()).count(True) == 1 and True in list(first.values())[:3]


def test_peers_of_another_training_are_refused(tmp_path: Path) -> None:
    with (
        opened(tmp_path, 0, digest=b"this") as (a,),
        opened(tmp_path, 1, digest=b"that") as (b,),
        pytest.raises(ValueError, match="trains something else"),
    ):
        for peers in (a, b):
            settled(peers)
            talked(peers, 0)


def test_a_stranger_does_not_stop_those_who_train(tmp_path: Path) -> None:
    with opened(tmp_path, 0, 1) as (a, b):
        together(lambda: settled(a), lambda: settled(b))
        with opened(tmp_path, 2, digest=b"that") as (c,), pytest.raises(ValueError, match="rank 1 trains something"):
            settled(c)
        for step in range(2):
            (ours, _), (theirs, _) = together(lambda s=step: talked(a, s), lambda s=step: talked(b, s))
            assert ours.keys() == {1} and theirs.keys() == {0}


def test_who_asks_for_parameters_too_early_gets_them_later(tmp_path: Path) -> None:
    with opened(tmp_path, 0, 1) as (a, b):
        b.meet(0)
        pulled = threading.Thread(target=lambda: got.append(b.pull(0)))
        got: list[Any] = []
        pulled.start()
        time.sleep(0.1)
        a.show(0, lambda: b"first model")
        pulled.join(5)
        assert got == [(0, b"first model")]
        a.show(5, lambda: b"later model")
        assert b.pull(0) == (5, b"later model")


def test_alone_nobody_waits_longer_than_agreed(tmp_path: Path) -> None:
    with opened(tmp_path, 1) as (b,):
        began = time.monotonic()
        settled(b)
        assert talked(b, 0) == ({}, {})
        assert time.monotonic() - began < 2 * TIMEOUT + 2


def test_meetings(tmp_path: Path) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=5), wait_for_workers=False)
    for book in (meeting(tmp_path / "new"), meeting(f"tcp://127.0.0.1:{store.port}")):
        assert book.read(3) is None
        book.write(3, ("127.0.0.1", 5))
        book.write(3, ("127.0.0.1", 6))
        assert book.read(3) == ("127.0.0.1", 6)
    assert isinstance(book, Store) and meeting(book) is book
    with pytest.raises(ValueError, match="names no host and port"):
        meeting("tcp://here")
