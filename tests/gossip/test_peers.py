"""Connections that survive their other end: agreed first steps, messages, and dropped peers."""

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
from gradwire.comm.rendezvous import FolderRendezvous, StoreRendezvous, rendezvous

TIMEOUT = 0.6
LINE = {0: [1], 1: [0, 2], 2: [1]}


@contextlib.contextmanager
def opened(
    folder: Path, *ranks: int, digest: bytes = b"same", timeout: float = TIMEOUT, line: dict[int, list[int]] = LINE
) -> Iterator[list[PeerMesh]]:
    meshes = [
        PeerMesh(rank, line[rank], FolderRendezvous(folder), digest, timeout=timeout, most_bytes=1000) for rank in ranks
    ]
    try:
        yield meshes
    finally:
        for mesh in meshes:
            mesh.close()


def together(*work: Callable[[], Any]) -> list[Any]:
    """What each call returns; all run at once."""
    results: list[Any] = [None] * len(work)

    def run(i: int) -> None:
        results[i] = work[i]()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


def join(mesh: PeerMesh, step: int = 0) -> None:
    mesh.discover(step)
    mesh.join(step, lambda: b"model")


def exchange(mesh: PeerMesh, step: int) -> tuple[dict[int, bool], dict[int, bytes]]:
    live = mesh.begin(step)
    received = mesh.exchange(step, 0, {peer: f"{mesh.rank} at {step}".encode() for peer in live})
    mesh.publish(step + 1, lambda: f"model after {step}".encode())
    return live, received


def test_messages_arrive_and_edges_are_new_once(tmp_path: Path) -> None:
    with opened(tmp_path, 0, 1, 2) as (a, b, c):
        together(lambda: join(a), lambda: join(b), lambda: join(c))
        for step in range(3):
            ours, theirs, _ = together(*(lambda p=p, step=step: exchange(p, step) for p in (a, b, c)))
            assert ours == ({1: step == 0}, {1: f"1 at {step}".encode()})
            assert theirs[1] == {0: f"0 at {step}".encode(), 2: f"2 at {step}".encode()}
        assert not a.edges.lost


def test_the_kernel_counts_the_same_bytes(tmp_path: Path) -> None:
    with opened(tmp_path, 0, 1, 2) as (a, b, c):
        together(lambda: join(a), lambda: join(b), lambda: join(c))
        for step in range(3):
            together(*(lambda p=p, step=step: exchange(p, step) for p in (a, b, c)))
        for mesh in (a, b, c):
            assert (
                mesh.edges.traffic.received == sum(_received(edge.channel.line) for edge in mesh.edges.snapshot()) > 0
            )
        assert a.edges.traffic.sent == _received(b.edges.by_peer[0].channel.line)
        assert c.edges.traffic.sent == _received(b.edges.by_peer[2].channel.line)


def _received(line: socket.socket) -> int:
    """tcpi_bytes_received of Linux."""
    info = line.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
    return int.from_bytes(info[128:136], "little")


def test_a_dead_peer_is_dropped_at_once_and_a_leaving_one_is_not_lost(tmp_path: Path) -> None:
    with opened(tmp_path, 1, timeout=20.0) as (b,):
        with opened(tmp_path, 0, 2, timeout=20.0) as (a, c):
            together(lambda: join(a), lambda: join(b), lambda: join(c))
            together(*(lambda p=p: exchange(p, 0) for p in (a, b, c)))
            a.edges.by_peer[1].channel.line.shutdown(socket.SHUT_RDWR)  # what a killed process leaves behind
            a.edges.closed = True
        began = time.monotonic()
        live, received = exchange(b, 1)
        assert received == {} and time.monotonic() - began < 5.0
        assert b.begin(2) == {} and len(b.edges.lost) == 1 and live.keys() <= {0}


def test_only_the_stalled_peer_is_dropped(tmp_path: Path) -> None:
    """Rank 1 waits for the silent rank 2; rank 0 waits for rank 1, which sends WAIT."""
    with opened(tmp_path, 0, 1, 2) as (a, b, c):
        together(lambda: join(a), lambda: join(b), lambda: join(c))
        together(*(lambda p=p: exchange(p, 0) for p in (a, b, c)))
        began = time.monotonic()
        (_, at_a), (_, at_b) = together(lambda: exchange(a, 1), lambda: exchange(b, 1))
        assert TIMEOUT * 0.8 < time.monotonic() - began < TIMEOUT * 2 + 1
        assert at_a == {1: b"1 at 1"} and at_b == {0: b"0 at 1"}
        assert (a.edges.lost, b.edges.lost) == ([], [2])


def test_a_rejoining_peer_starts_from_a_neighbor_at_an_agreed_step(tmp_path: Path) -> None:
    with opened(tmp_path, 0, timeout=5.0) as (a,):
        with opened(tmp_path, 1, timeout=5.0, line={1: [0]}) as (b,):
            together(lambda: join(a), lambda: join(b))
            together(lambda: exchange(a, 0), lambda: exchange(b, 0))
        for step in range(1, 40):
            exchange(a, step)
        with opened(tmp_path, 1, timeout=5.0, line={1: [0]}) as (b,):
            assert b.discover(0) == 0
            state = b.pull(0)
            assert state is not None and state[1] == f"model after {state[0] - 1}".encode()
            b.join(state[0], lambda: b"")
            first = {}
            for step in range(state[0], state[0] + 6):
                (mine, _), (theirs, received) = together(lambda s=step: exchange(a, s), lambda s=step: exchange(b, s))
                assert mine == {1: theirs[0]} if theirs else not mine
                if theirs:
                    first[step] = theirs[0]
                assert received.keys() == theirs.keys()
            assert list(first.values()).count(True) == 1 and True in list(first.values())[:3]


def test_peers_of_another_training_are_refused(tmp_path: Path) -> None:
    with (
        opened(tmp_path, 0, digest=b"this") as (a,),
        opened(tmp_path, 1, digest=b"that") as (b,),
        pytest.raises(ValueError, match="trains something else"),
    ):
        for mesh in (a, b):
            join(mesh)
            exchange(mesh, 0)


def test_a_peer_of_another_training_does_not_stop_joined_ranks(tmp_path: Path) -> None:
    with opened(tmp_path, 0, 1) as (a, b):
        together(lambda: join(a), lambda: join(b))
        with opened(tmp_path, 2, digest=b"that") as (c,), pytest.raises(ValueError, match="rank 1 trains something"):
            join(c)
        for step in range(2):
            (ours, _), (theirs, _) = together(lambda s=step: exchange(a, s), lambda s=step: exchange(b, s))
            assert ours.keys() == {1} and theirs.keys() == {0}


def test_a_pull_before_parameters_exist_is_answered_later(tmp_path: Path) -> None:
    with opened(tmp_path, 0, 1) as (a, b):
        b.discover(0)
        pulled = threading.Thread(target=lambda: got.append(b.pull(0)))
        got: list[Any] = []
        pulled.start()
        time.sleep(0.1)
        a.publish(0, lambda: b"first model")
        pulled.join(5)
        assert got == [(0, b"first model")]
        a.publish(5, lambda: b"later model")
        assert b.pull(0) == (5, b"later model")


def test_a_rank_without_peers_waits_no_longer_than_the_timeout(tmp_path: Path) -> None:
    with opened(tmp_path, 1) as (b,):
        began = time.monotonic()
        join(b)
        assert exchange(b, 0) == ({}, {})
        assert time.monotonic() - began < 2 * TIMEOUT + 2


def test_a_rank_that_was_cut_off_asks_where_the_others_are(tmp_path: Path) -> None:
    with opened(tmp_path, 0, 1, timeout=20) as (a, b):
        together(lambda: a.join(0, lambda: b""), lambda: b.join(0, lambda: b""))
        assert not b.is_cut_off(0)
        b.leave()
        assert b.await_peer(0) and b.is_cut_off(0)
        for step in range(3):
            assert exchange(a, step)[0] == {}
        a._agreement._active = -20  # it computes for long
        began = time.monotonic()
        assert b.ask(2, [0, 2])  # 2 was never there, and need not be
        assert time.monotonic() - began < 10 and b.discover(2) == 0
        assert not b.ask(3, [0])
        assert not a.ask(0, [1])  # it has not joined again


def test_a_peer_that_does_not_answer_is_dropped(tmp_path: Path) -> None:
    with opened(tmp_path, 0) as (a,):
        a._agreement.handle = lambda *frame: None  # type: ignore[method-assign]
        with opened(tmp_path, 1) as (b,):
            assert b.await_peer(0)
            edge, began = b.edges.by_peer[0], time.monotonic()
            assert not b.ask(0, [])
            assert not edge.alive and time.monotonic() - began >= TIMEOUT


def test_addresses_are_replaced(tmp_path: Path) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=5), wait_for_workers=False)
    for table in (rendezvous(tmp_path / "new"), rendezvous(f"tcp://127.0.0.1:{store.port}")):
        assert table.read(3) is None
        table.write(3, ("127.0.0.1", 5))
        table.write(3, ("127.0.0.1", 6))
        assert table.read(3) == ("127.0.0.1", 6)
    assert isinstance(table, StoreRendezvous) and rendezvous(table) is table
    with pytest.raises(ValueError, match="names no host and port"):
        rendezvous("tcp://here")
