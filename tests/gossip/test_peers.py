"""Connections that survive their other end: agreed first steps, messages, and dropped peers."""

import contextlib
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from gradwire.comm.peer_agreement import EdgeAgreement
from gradwire.comm.peer_edges import UNCOUNTED, Edge, FrameKind
from gradwire.comm.peer_mesh import PeerMesh
from gradwire.comm.rendezvous import FolderRendezvous, StoreRendezvous, rendezvous
from gradwire.comm.secure_channel import SecureChannel

PATIENCE = 30.0  # where all answer, however busy the machine is
TIMEOUT = 2.0  # where a rank is silent, and the others wait for it
LINE = {0: [1], 1: [0, 2], 2: [1]}
PAIR = {0: [1], 1: [0]}


@contextlib.contextmanager
def opened(
    folder: Path, *ranks: int, digest: bytes = b"same", timeout: float = PATIENCE, line: dict[int, list[int]] = LINE
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
        thread.join(2 * PATIENCE)
    return results


def wait_for(mesh: PeerMesh, holds: Callable[[], bool]) -> None:
    """Until the threads of a mesh have read what was sent to it."""
    with mesh.edges.changed:
        assert mesh.edges.changed.wait_for(holds, PATIENCE)


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
    with opened(tmp_path, 1) as (b,):
        with opened(tmp_path, 0, 2) as (a, c):
            together(lambda: join(a), lambda: join(b), lambda: join(c))
            together(*(lambda p=p: exchange(p, 0) for p in (a, b, c)))
            a.edges.by_peer[1].channel.line.shutdown(socket.SHUT_RDWR)  # what a killed process leaves behind
            a.edges.closed = True
        wait_for(b, lambda: 2 not in b.edges.by_peer)
        began = time.monotonic()
        live, received = exchange(b, 1)
        assert received == {} and time.monotonic() - began < PATIENCE / 2
        assert b.begin(2) == {} and len(b.edges.lost) == 1 and live.keys() <= {0}


def test_only_the_stalled_peer_is_dropped(tmp_path: Path) -> None:
    """Rank 1 waits for the silent rank 2; rank 0 waits for rank 1, which sends WAIT."""
    with opened(tmp_path, 0, 1, 2, timeout=TIMEOUT) as (a, b, c):
        together(lambda: join(a), lambda: join(b), lambda: join(c))
        together(*(lambda p=p: exchange(p, 0) for p in (a, b, c)))
        began = time.monotonic()
        (_, at_a), (_, at_b) = together(lambda: exchange(a, 1), lambda: exchange(b, 1))
        assert TIMEOUT * 0.8 < time.monotonic() - began < TIMEOUT * 2 + 3
        assert at_a == {1: b"1 at 1"} and at_b == {0: b"0 at 1"}
        assert (a.edges.lost, b.edges.lost) == ([], [2])


def test_a_rejoining_peer_starts_from_a_neighbor_at_an_agreed_step(tmp_path: Path) -> None:
    with opened(tmp_path, 0) as (a,):
        with opened(tmp_path, 1, line=PAIR) as (b,):
            together(lambda: join(a), lambda: join(b))
            together(lambda: exchange(a, 0), lambda: exchange(b, 0))
        for step in range(1, 40):
            exchange(a, step)
        with opened(tmp_path, 1, line=PAIR) as (b,):
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


def connected_again(mesh: PeerMesh, peer: int) -> None:
    """Drop a connection, and wait for the next one."""
    old = mesh.edges.by_peer[peer]
    mesh.drop(peer, "must connect again")
    deadline = time.monotonic() + 10
    while mesh.edges.by_peer.get(peer, old) is old and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.mark.parametrize("index", [0, UNCOUNTED])
def test_a_peer_that_connects_again_during_an_exchange_is_not_awaited(tmp_path: Path, index: int) -> None:
    """Neither for the message of a round, nor for the numbers of an evaluation."""
    with opened(tmp_path, 0, 1, timeout=20.0, line=PAIR) as (a, b):
        together(lambda: join(a), lambda: join(b))
        together(lambda: exchange(a, 0), lambda: exchange(b, 0))
        live = a.partners(1) if index else a.begin(1)
        assert list(live) == [1]
        connected_again(a, 1)
        began = time.monotonic()
        assert a.exchange(1, index, dict.fromkeys(live, b"")) == {}
        assert time.monotonic() - began < 10 and 1 in a.edges.by_peer


def test_a_handshake_that_outlasts_a_rank_makes_no_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its peer would hold on to a rank that has left, and not find the one that takes its place."""
    with opened(tmp_path, 0, timeout=5.0, line=PAIR) as (a,):
        greeted, closed, greet = threading.Event(), threading.Event(), a._connector._greet

        def greet_late(*args: Any) -> Any:
            greeted.set()
            assert closed.wait(10)
            return greet(*args)

        monkeypatch.setattr(a._connector, "_greet", greet_late)
        with opened(tmp_path, 1, timeout=5.0, line=PAIR) as (b,):
            assert greeted.wait(10)
            a.close()
            closed.set()
            with opened(tmp_path, 0, timeout=5.0, line=PAIR) as (successor,):
                assert successor.await_peer(1) and b.await_peer(0)


def test_a_rank_that_has_left_is_not_offered_one_step_after_another(tmp_path: Path) -> None:
    """It answers once, and both ends then begin at its next step."""
    with opened(tmp_path, 0, 1, timeout=5.0, line=PAIR) as (a, b):
        assert a.await_peer(1) and b.await_peer(0)
        b._agreement.join(0, lambda: b"", {})
        with b._agreement.active(announces=True):
            time.sleep(0.1)
        b.leave()
        before = a.edges.traffic.sent
        joining = threading.Thread(target=a.join, args=(0, lambda: b""))
        joining.start()
        time.sleep(0.3)
        assert a.edges.traffic.sent - before < 200  # bytes
        b.join(0, lambda: b"")
        joining.join(10)
        assert a.await_edges([], 0.0)[1] <= 1


def test_a_refusal_that_an_announcement_overtakes_is_followed_by_another(tmp_path: Path, monkeypatch: Any) -> None:
    """The offering rank waited for an announcement that it had read already."""
    with opened(tmp_path, 0, 1, timeout=10.0, line=PAIR) as (a, b):
        assert a.await_peer(1) and b.await_peer(0)
        refused, announced = threading.Event(), threading.Event()
        send = b.edges.send

        def send_late(edge: Edge, kind: FrameKind, step: int = 0, index: int = 0, body: bytes = b"") -> bool:
            if kind == FrameKind.REFUSE:
                refused.set()
                assert step == -1 and announced.wait(PATIENCE)
            return send(edge, kind, step, index, body)

        monkeypatch.setattr(b.edges, "send", send_late)
        a.edges.by_peer[1].peer_step = 0  # as after an announcement that it has taken back
        joining = threading.Thread(target=a.join, args=(0, lambda: b""))
        joining.start()
        assert refused.wait(PATIENCE)
        b._agreement.join(0, lambda: b"", {})
        with b._agreement.active(announces=True):
            announced.set()
        joining.join(PATIENCE)
        assert a.await_edges([], 0.0) == {1: 0}


def test_a_connection_that_is_made_while_a_rank_joins_is_announced(tmp_path: Path, monkeypatch: Any) -> None:
    """The rank had listed its connections, and was not active yet; both waited for the other's announcement."""
    with contextlib.ExitStack() as stack:
        (a,) = stack.enter_context(opened(tmp_path, 0, timeout=10.0, line=PAIR))
        pool = stack.enter_context(ThreadPoolExecutor(1))

        def connect(edges: list[Edge]) -> None:
            (b,) = stack.enter_context(opened(tmp_path, 1, timeout=10.0, line=PAIR))
            assert b.await_peer(0)
            pool.submit(b.join, 0, lambda: b"")
            wait_for(a, lambda: 1 in a.edges.by_peer and a.edges.by_peer[1].peer_step == 0)
            time.sleep(0.2)  # while its thread is not active, and offers nothing

        monkeypatch.setattr(a._agreement, "send_state", connect)
        a.join(0, lambda: b"")
        assert a.await_edges([], 0.0) == {1: 0}


def test_what_a_peer_sent_before_it_connected_again_is_read(tmp_path: Path, monkeypatch: Any) -> None:
    """A peer that had left was lost, where its next connection came before its LEAVE was read."""
    handle = EdgeAgreement.handle

    def handle_late(agreement: EdgeAgreement, edge: Edge, kind: int, *frame: Any) -> None:
        if kind == FrameKind.LEAVE:
            time.sleep(0.3)
        handle(agreement, edge, kind, *frame)

    monkeypatch.setattr(EdgeAgreement, "handle", handle_late)
    with opened(tmp_path, 0, 1, line=PAIR) as (a, b):
        together(lambda: join(a), lambda: join(b))
        old = a.edges.by_peer[1]
        b.leave()
        wait_for(a, lambda: a.edges.by_peer.get(1, old) is not old)
        assert a.edges.lost == []


def test_an_edge_that_begins_later_leaves_nobody_behind(tmp_path: Path) -> None:
    """Ranks that step fast agree on a step that neither has come to; each would become a copy of the other."""
    with opened(tmp_path, 0, 1, timeout=5.0, line=PAIR) as (a, b):
        assert a.await_peer(1) and b.await_peer(0)
        a.edges.by_peer[1].tries = 4  # as after four refusals
        together(lambda: a.join(0, lambda: b""), lambda: b.join(0, lambda: b""))
        assert a.await_edges([], 0.0) == {1: 15} and b.await_edges([], 0.0) == {0: 15}
        assert not a.is_left_behind(0, slack=2) and not b.is_left_behind(0, slack=2)


def test_a_rank_between_two_that_went_on_apart_joins_the_one_that_is_further(tmp_path: Path) -> None:
    """Not the one that it reaches first."""
    with opened(tmp_path, 0, 2, timeout=20.0) as (a, c):
        for mesh, step in ((a, 5), (c, 50)):
            mesh._agreement.join(step, lambda: b"", {})
            with mesh._agreement.active():
                pass
        with opened(tmp_path, 1, timeout=20.0) as (b,):
            assert b.discover(0) == 2


@pytest.mark.parametrize("slow", [0, 1])
def test_only_the_rank_that_is_behind_is_left_behind(tmp_path: Path, slow: int) -> None:
    """Whichever of the two offers the edge's first step."""
    with opened(tmp_path, 0, 1, timeout=5.0, line=PAIR) as meshes:
        together(*(lambda mesh=mesh: join(mesh) for mesh in meshes))
        behind, ahead = meshes[slow], meshes[1 - slow]
        behind._agreement._active = -20.0  # it computes for long
        connected_again(ahead, slow)
        for step in range(40):
            exchange(ahead, step)
        behind.begin(0)
        assert behind.await_edges([1 - slow], 5.0)[1 - slow] >= 40
        assert behind.is_left_behind(0, slack=2) and not ahead.is_left_behind(40, slack=2)


def test_no_edge_begins_before_the_step_that_a_rank_waits_for(tmp_path: Path) -> None:
    with opened(tmp_path, 0, 1, timeout=5.0) as (a, b):
        together(lambda: a.join(0, lambda: b""), lambda: b.join(0, lambda: b""))
        pulling = threading.Thread(target=b.pull, args=(0, 5))
        pulling.start()
        time.sleep(0.1)
        with opened(tmp_path, 2, timeout=5.0) as (c,):
            join(c)
            assert c.await_edges([1], 2.0) == {1: 5}
            a.publish(5, lambda: b"")
            pulling.join(10)


def test_a_peer_that_sends_no_parameters_is_dropped(tmp_path: Path) -> None:
    """Else a rank that was left behind would wait for one that hangs in every step."""
    with opened(tmp_path, 0, 1, timeout=TIMEOUT, line=PAIR) as (a, b):
        together(lambda: join(a), lambda: join(b))
        edge, began = b.edges.by_peer[0], time.monotonic()
        assert b.pull(0, at_least=5) is None
        assert not edge.alive and TIMEOUT <= time.monotonic() - began < TIMEOUT + 2


def test_a_rank_that_waits_says_so_to_those_that_wait_in_a_later_step(tmp_path: Path) -> None:
    """Rank 2 has joined for step 1, and waits there for rank 1, which waits in step 0 for the rank before it."""
    with opened(tmp_path, 0, 1, timeout=1.0) as (a, b):
        together(lambda: a.join(0, lambda: b""), lambda: b.join(0, lambda: b""))
        told = threading.Thread(target=lambda: [time.sleep(0.2) or send_wait(a) for _ in range(7)])
        waiting = threading.Thread(target=exchange, args=(b, 0))
        told.start()
        waiting.start()
        time.sleep(0.1)
        with opened(tmp_path, 2, timeout=1.0) as (c,):
            c.discover(0)
            c.join(1, lambda: b"")
            assert c.await_edges([1], 0.0) == {1: 1}
            late = threading.Thread(target=lambda: (told.join(), exchange(a, 0), waiting.join(), exchange(b, 1)))
            late.start()
            assert exchange(c, 1) == ({1: True}, {1: b"1 at 1"}) and not c.edges.lost
            late.join(10)


def send_wait(mesh: PeerMesh) -> None:
    for edge in mesh.edges.snapshot():
        mesh.edges.send(edge, FrameKind.WAIT)


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
        together(lambda: join(a), lambda: b.join(0, lambda: b""))  # rank 2, its other neighbor, is not there yet
        with opened(tmp_path, 2, digest=b"that") as (c,), pytest.raises(ValueError, match="rank 1 trains something"):
            join(c)
        for step in range(2):
            (ours, _), (theirs, _) = together(lambda s=step: exchange(a, s), lambda s=step: exchange(b, s))
            assert ours.keys() == {1} and theirs.keys() == {0}


def test_a_pull_before_parameters_exist_is_answered_later(tmp_path: Path) -> None:
    with opened(tmp_path, 0, 1, line=PAIR) as (a, b):
        b.discover(0)
        pulled = threading.Thread(target=lambda: got.append(b.pull(0)))
        got: list[Any] = []
        pulled.start()
        time.sleep(0.1)
        a.publish(0, lambda: b"first model")
        pulled.join(PATIENCE)
        assert got == [(0, b"first model")]
        a.publish(5, lambda: b"later model")
        assert b.pull(0) == (5, b"later model")


def test_a_rank_without_peers_waits_no_longer_than_the_timeout(tmp_path: Path) -> None:
    with opened(tmp_path, 1, timeout=TIMEOUT) as (b,):
        began = time.monotonic()
        join(b)
        assert exchange(b, 0) == ({}, {})
        assert time.monotonic() - began < 2 * TIMEOUT + 6


def test_a_rank_that_was_cut_off_asks_where_the_others_are(tmp_path: Path) -> None:
    with opened(tmp_path, 0, 1) as (a, b):
        together(lambda: a.join(0, lambda: b""), lambda: b.join(0, lambda: b""))
        assert not b.is_cut_off(0)
        b.leave()
        assert b.await_peer(0) and b.is_cut_off(0)
        wait_for(a, lambda: a.edges.is_cut_off(0))
        for step in range(3):
            assert exchange(a, step)[0] == {}
        a._agreement._active = -20  # it computes for long
        began = time.monotonic()
        assert b.ask(2, [0, 2])  # 2 was never there, and need not be
        assert time.monotonic() - began < PATIENCE / 2 and b.discover(2) == 0
        assert not b.ask(3, [0])
        assert not a.ask(0, [1])  # it has not joined again


def test_a_peer_that_does_not_answer_is_dropped(tmp_path: Path) -> None:
    with opened(tmp_path, 0) as (a,):
        a._agreement.handle = lambda *frame: None  # type: ignore[method-assign]
        with opened(tmp_path, 1) as (b,):
            assert b.await_peer(0)
            b.edges.timeout = TIMEOUT
            edge, began = b.edges.by_peer[0], time.monotonic()
            assert not b.ask(0, [])
            assert not edge.alive and time.monotonic() - began >= TIMEOUT


def test_a_state_that_takes_longer_than_the_timeout_is_awaited_while_it_arrives(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """A frame counted as life at its end alone, and the peer that sent it was dropped amid it."""
    write = SecureChannel._write

    def write_slowly(channel: SecureChannel, data: bytes, deadline: float = math.inf) -> None:
        for start in range(0, len(data), 100):
            time.sleep(0.6 * (len(data) > 100))
            write(channel, data[start : start + 100], deadline)

    with opened(tmp_path, 0, 1, timeout=2.0, line=PAIR) as (a, b):
        assert b.await_peer(0)
        a._agreement.join(0, lambda: bytes(700), {})
        monkeypatch.setattr(SecureChannel, "_write", write_slowly)
        began, edge = time.monotonic(), b.edges.by_peer[0]
        assert b.pull(0) == (0, bytes(700))
        assert time.monotonic() - began > 2 * b.timeout and edge.alive


def test_a_rank_that_cannot_copy_those_that_are_further_does_not_go_on(tmp_path: Path) -> None:
    """It went on alone, as if it were the furthest."""
    with opened(tmp_path, 0, 1, line=PAIR) as (a, b):
        assert b.await_peer(0)
        a._agreement.join(5, lambda: b"", {})
        with pytest.raises(RuntimeError, match=r"rank 1 could not copy what a peer beyond its step 0 holds"):
            b.catch_up(0, lambda peer: False)


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


def test_a_rank_that_was_stopped_itself_reads_before_it_drops_another(tmp_path: Path, monkeypatch: Any) -> None:
    """As a process that is continued: the message came in time, and is read late."""
    handle, goes_on = EdgeAgreement.handle, threading.Event()

    def handle_late(agreement: EdgeAgreement, edge: Any, kind: int, *rest: Any) -> None:
        if agreement.rank == 0 and kind == FrameKind.MESSAGE:
            goes_on.wait(PATIENCE)
        handle(agreement, edge, kind, *rest)

    monkeypatch.setattr(EdgeAgreement, "handle", handle_late)
    with opened(tmp_path, 0, 1, timeout=TIMEOUT, line=PAIR) as (stopped, other):
        together(lambda: join(stopped), lambda: join(other))
        with ThreadPoolExecutor(2) as pool:
            rounds = [pool.submit(exchange, mesh, 0) for mesh in (stopped, other)]
            assert rounds[1].result(PATIENCE)[1] == {0: b"0 at 0"}
            with stopped.edges.changed:
                time.sleep(TIMEOUT + 0.5)
            time.sleep(0.2)
            goes_on.set()
            assert rounds[0].result(PATIENCE)[1] == {1: b"1 at 0"}
        assert stopped.edges.lost == []


def test_a_peer_that_does_not_read_parameters_does_not_stop_the_rank_that_sends_them(tmp_path: Path) -> None:
    """It waits for those of a later step, which are sent at the end of a round."""
    with opened(tmp_path, 0, 1, timeout=TIMEOUT, line=PAIR) as (a, b):
        together(lambda: join(a), lambda: join(b))
        with b.edges.changed:  # its reader stands still
            a.edges.by_peer[1].wanted = 5
            began = time.monotonic()
            a.publish(5, lambda: bytes(2**26))
            assert time.monotonic() - began < TIMEOUT


def test_a_rank_that_joins_asks_a_peer_that_computes_where_another_is_further(tmp_path: Path) -> None:
    with opened(tmp_path, 0, 2) as (a, c):
        for mesh, step in ((a, 10), (c, 100)):
            mesh._agreement.join(step, lambda: b"", {})
        a._agreement._active = math.inf
        with opened(tmp_path, 1) as (b,):
            assert b.discover(0) == 2
