"""Elastic rounds: workers that die, miss rounds, come back and join, in threads."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fixtures
import gradwire
import local_fixtures
from gradwire.comm.elastic_rounds import Ballot, leader_of, members_of
from gradwire.comm.peer_edges import FrameKind

SPARSE = "sparseloco(H=2, k=4, chunk=32)"
TIMEOUT = 60.0  # generous, since other work may hold the cores
SEEDING = threading.Lock()  # all threads have one generator


def adamw(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.01)


class Worker:
    """One worker of an elastic group, and its training."""

    def __init__(self, rank: int, world: int, folder: Path, spec: Any = SPARSE, **options: Any) -> None:
        with SEEDING:
            self.rank, self.net = rank, fixtures.model(seed=rank)  # they start as rank 0
        self.optimizer = adamw(self.net)
        place = {"meeting": folder, "rank": rank, "world": world, "timeout": TIMEOUT}
        self.outer: Any = gradwire.local(
            self.net, self.optimizer, spec, elastic=True, **{"bundle": None, **place, **options}
        )

    def train(self, until: int) -> "Worker":
        while self.outer.steps < until:
            self.optimizer.zero_grad()
            fixtures.loss(self.net, self.rank, self.outer.steps).backward()
            self.optimizer.step()
            self.outer()
        return self

    def train_until(self, ended: threading.Event) -> None:
        while not ended.is_set():
            self.train(self.outer.steps + 1)
            time.sleep(0.01)

    def train_with_all(self) -> None:
        """Until a round in which all count, which is the same one for all of them."""
        group, deadline = self.outer.group, time.monotonic() + TIMEOUT
        while time.monotonic() < deadline:
            resyncs = group.resyncs
            self.train(self.outer.steps + 1)
            if group.resyncs == resyncs and group.rounds.members == tuple(range(group.link.world)):
                return

    def weights(self) -> dict[str, Tensor]:
        return {name: x.detach().clone() for name, x in self.outer.outer.weights.items()}


def together(*work: Callable[[], Any]) -> list[Any]:
    """Calls at the same time, each in a thread."""
    with ThreadPoolExecutor(len(work)) as threads:
        return [future.result(120) for future in [threads.submit(one) for one in work]]


def elastic_workers(world: int, folder: Path, **options: Any) -> list[Worker]:
    return together(*(lambda rank=rank: Worker(rank, world, folder, **options) for rank in range(world)))


def train(workers: list[Worker], until: int) -> None:
    together(*(lambda one=one: one.train(until) for one in workers))


def close(workers: list[Worker]) -> None:
    together(*(one.outer.close for one in workers))


@pytest.mark.parametrize(
    "options",
    [{"spec": SPARSE}, {"spec": "diloco(H=2)", "codec": "int8"}, {"spec": "local_sgd(H=2)", "codec": "qsgd"}],
    ids=["sparseloco", "int8", "random bits"],
)
def test_without_losses_it_equals_other_rounds_bit_for_bit(options: dict[str, Any], tmp_path: Path) -> None:
    workers = elastic_workers(3, tmp_path, **options)
    train(workers, 6)
    nets, optimizers, outer = local_fixtures.local_replicas(
        options["spec"],
        3,
        adamw,
        bundle=None,
        codec=options.get("codec"),
        exchange="allgather" if "codec" in options else None,
    )
    local_fixtures.train(nets, optimizers, outer, range(6))
    for mine, other in zip(workers, outer.ranks, strict=True):
        expected = other.state_dict()
        group, found = mine.outer.group, mine.outer.state_dict()
        assert (group.missed, group.resyncs, group.rounds.members) == (0, mine.rank > 0, (0, 1, 2))
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    assert workers[0].outer.report().payload == outer.ranks[0].report().payload
    close(workers)


# -- losses ------------------------------------------------------------------------------------------------------------


def mean_of(workers: list[Worker]) -> dict[str, Tensor]:
    nets = [dict(one.net.named_parameters()) for one in workers]
    return {name: torch.stack([net[name].detach() for net in nets]).mean(0) for name in nets[0]}


def check_round(workers: list[Worker], others: tuple[Callable[[], Any], ...] = ()) -> None:
    """The next round leads to the mean of these workers' weights."""
    for one in workers:
        fixtures.loss(one.net, one.rank, one.outer.steps).backward()
        one.optimizer.step()
    expected = mean_of(workers)
    together(*(one.outer for one in workers), *others)
    for one in workers:
        for name, x in one.weights().items():
            torch.testing.assert_close(x, expected[name], rtol=1e-5, atol=1e-6)


def test_rounds_go_on_without_a_worker_that_left_and_with_one_that_came_back(tmp_path: Path) -> None:
    workers = elastic_workers(3, tmp_path, spec="local_sgd(H=1)")
    check_round(workers)
    workers[1].outer.close()
    check_round([workers[0], workers[2]])
    workers[1] = Worker(1, 3, tmp_path, spec="local_sgd(H=1)")
    assert fixtures.same(workers[1].weights(), workers[0].weights())
    assert fixtures.same(dict(workers[1].net.named_parameters()), workers[0].weights())
    assert workers[1].outer.steps == workers[0].outer.steps == 2
    check_round(workers)
    assert all(one.outer.group.rounds.members == (0, 1, 2) for one in workers)
    close(workers)


def cut(worker: Worker, connect: threading.Event) -> None:
    """As if its connections were cut while it computes. It connects again after an event."""
    connector = worker.outer.group.mesh._connector
    greet = connector._greet
    connector._greet = lambda *line: greet(*line) if connect.wait(TIMEOUT) else None
    worker.outer.group.mesh.leave()


@pytest.mark.parametrize("early", [True, False], ids=["connected before others go on", "connected afterwards"])
def test_a_worker_that_missed_rounds_keeps_its_error_and_starts_from_the_outer_weights(
    early: bool, tmp_path: Path
) -> None:
    workers = elastic_workers(3, tmp_path)
    train(workers, 4)
    lost, others = workers[1], [workers[0], workers[2]]
    error = fixtures.memories(lost.outer.wire)
    assert any(float(x.abs().max()) > 0 for x in error.values())
    cut(lost, connect := threading.Event())
    if early:  # others announce the round in which they are now, and no later one
        connect.set()
        assert all(lost.outer.group.mesh.await_peer(one.rank) for one in others)
    train(others, 8)
    threading.Timer(0.2, connect.set).start()  # else when it waits for the others
    lost.train(lost.outer.steps + 2)  # a round that nobody awaits
    assert lost.outer.group.resyncs == 2 and lost.outer.steps == 8
    assert fixtures.same(fixtures.memories(lost.outer.wire), error)
    assert fixtures.same(dict(lost.net.named_parameters()), others[0].weights())
    train(workers, 12)
    assert all(one.outer.group.rounds.members == (0, 1, 2) for one in workers)
    assert all(fixtures.same(one.weights(), lost.weights()) for one in others)
    assert not fixtures.same(fixtures.memories(lost.outer.wire), error)
    close(workers)


class Addresses:
    """Where workers listen, but for some."""

    def __init__(self, table: Any, hidden: tuple[int, ...]) -> None:
        self._table, self.hidden = table, hidden

    def read(self, rank: int) -> Any:
        return None if rank in self.hidden else self._table.read(rank)


def cut_off(worker: Worker, *peers: int) -> Addresses:
    """As if the network had lost its connections to lower ranks, which it dials again once they are not hidden."""
    mesh = worker.outer.group.mesh
    addresses = mesh._connector._rendezvous = Addresses(mesh._connector._rendezvous, peers)
    for peer in peers:
        mesh.drop(peer, "is out of reach")
    return addresses


def without_edge_to_0(folder: Path, rank: int) -> list[Worker]:
    """Three workers after two rounds; then one of them loses its connection to rank 0."""
    workers = elastic_workers(3, folder, spec="local_sgd(H=1)", timeout=20.0)
    train(workers, 2)
    cut_off(workers[rank], 0)
    return workers


def test_a_worker_that_cannot_reach_the_leader_takes_over_what_another_has(tmp_path: Path) -> None:
    """It missed all rounds, and started each again from older weights."""
    workers = first, second, lost = without_edge_to_0(tmp_path, 2)
    # It misses round 2, and finds in round 3 that the second worker is further.
    together(lambda: first.train(4), lambda: second.train(4), lambda: lost.train(3))
    assert (lost.outer.group.missed, lost.outer.group.resyncs, lost.outer.steps) == (2, 2, 4)
    assert fixtures.same(lost.weights(), second.weights()) and fixtures.same(first.weights(), second.weights())
    assert first.outer.group.rounds.members == second.outer.group.rounds.members == (0, 1)
    close(workers)


def test_a_worker_that_reaches_one_follower_alone_follows_with_it(tmp_path: Path) -> None:
    """Of two workers with different histories, it went on with its own, as the older one, and trained alone."""
    workers = first, lost, second = without_edge_to_0(tmp_path, 1)
    # It leads itself in round 2, and finds in round 3 that the other one has more connections.
    together(lambda: first.train(4), lambda: second.train(4), lambda: lost.train(4))
    assert fixtures.same(lost.weights(), second.weights()) and fixtures.same(first.weights(), second.weights())
    assert lost.outer.group.resyncs == 2
    close(workers)


def test_parts_of_a_split_group_that_are_far_apart_come_together(tmp_path: Path) -> None:
    """Each had a round to make with the other that was far away, and went on alone."""
    workers = elastic_workers(3, tmp_path, spec="local_sgd(H=1)", timeout=5.0)
    train(workers, 2)
    *others, lost = workers
    addresses = cut_off(lost, 0, 1)
    lost.outer.group.rounds.members = (2,)  # it does not wait for the others
    lost.outer.group.rounds.step = lost.outer.steps = 1000
    lost.train(1001)
    train(others, 4)
    addresses.hidden = ()
    assert all(one.outer.group.mesh.await_peer(2) for one in others)
    together(*(one.train_with_all for one in workers))
    assert [one.outer.group.resyncs > one.rank for one in others] == [True, True]
    assert [one.outer.steps for one in workers] == [lost.outer.steps] * 3 and lost.outer.steps > 1001
    assert all(fixtures.same(one.weights(), lost.weights()) for one in others)
    close(workers)


def test_a_worker_agrees_to_no_round_before_the_one_whose_state_it_waits_for(tmp_path: Path, monkeypatch: Any) -> None:
    """Another one waited for it in such a round, and it for the others, which waited for that one."""
    workers = elastic_workers(3, tmp_path, spec="local_sgd(H=1)")
    train(workers, 2)
    *others, late = workers
    group, ended, waits = late.outer.group, threading.Event(), list[tuple[int, int]]()
    join, copy = group.mesh.join, group._copy

    def join_late(step: int, snapshot: Any) -> None:
        while others[0].outer.steps < step + 3:
            time.sleep(0.01)
        join(step, snapshot)

    def note(peer: int, at_least: int) -> bool:
        waits.append((at_least, group.mesh._agreement.next_step))
        return copy(peer, at_least)

    addresses = cut_off(late, 0, 1)
    train(others, 4)
    monkeypatch.setattr(group.mesh, "join", join_late)
    monkeypatch.setattr(group, "_copy", note)
    addresses.hidden = ()
    assert all(group.mesh.await_peer(one.rank) for one in others)
    goes_on = (lambda one=one: one.train_until(ended) for one in others)
    together(
        *goes_on, lambda: (late.train(3), ended.set(), late.outer.close())
    )  # or they would wait for its next round
    assert len(waits) == 2 and waits[1][0] == waits[1][1] > 4
    close(others)


def test_a_worker_that_dies_and_is_back_within_a_round_is_not_awaited_in_it(tmp_path: Path) -> None:
    """The others waited for its ballot, and it for their next round."""
    options: dict[str, Any] = {"spec": "local_sgd(H=1)", "timeout": 10.0}
    workers = elastic_workers(3, tmp_path, **options)
    train(workers, 2)
    first, second, dying = workers
    edges = first.outer.group.mesh.edges
    edge, sockets = edges.by_peer[2], dying.outer.group.mesh
    with ThreadPoolExecutor(3) as pool:
        rounds = [pool.submit(one.train, 9) for one in (first, dying)]
        deadline = time.monotonic() + TIMEOUT
        while not (edge.messages and first.outer.group.mesh._agreement.next_step > 2) and time.monotonic() < deadline:
            time.sleep(0.01)  # until the first has begun the round, and waits for the second
        assert edge.messages
        with sockets.edges.changed:
            sockets.edges.closed = True
            for line in sockets.edges.live():
                sockets.edges.drop(line)
        sockets._connector.close()
        back = pool.submit(lambda: Worker(2, 3, tmp_path, **options).train(9))
        with edges.changed:
            assert edges.changed.wait_for(lambda: (edges.by_peer.get(2, edge).start or 0) > 2, 10.0)
        second.train(9)
        rounds[0].result(30)
        assert edges.lost == [2] and first.outer.group.missed == 0
        close([first, second, back.result(30)])


def test_a_worker_that_is_left_alone_says_so(tmp_path: Path, caplog: Any) -> None:
    """Workers whose messages came too late trained apart, without a word."""
    first, second = elastic_workers(2, tmp_path, spec="local_sgd(H=1)")
    train([first, second], 1)
    assert "alone" not in caplog.text
    second.outer.close()
    first.outer.group.mesh.edges.timeout = 1.0
    first.train(3)
    assert caplog.text.count("rank 0 makes round 1 alone, without [1]; if they run") == 1
    assert caplog.text.count("alone") == 1
    close([first])


def test_a_worker_that_takes_over_one_state_after_another_says_so(tmp_path: Path, caplog: Any) -> None:
    first, second = elastic_workers(2, tmp_path, spec="local_sgd(H=1)")
    group = second.outer.group
    for _ in range(3):  # one at its start
        assert group._copy(0, at_least=0)
    assert "rank 1 has taken over 4 states, and counted in no round between them; a state takes" in caplog.text
    train([first, second], 1)
    caplog.clear()
    assert group._copy(0, at_least=0) and not caplog.text
    close([first, second])


def test_a_worker_that_joins_counts_as_many_rounds_as_the_others(tmp_path: Path) -> None:
    """Its own count was that of the group, which counts rounds that were tried again, too."""
    first, second = elastic_workers(2, tmp_path, spec="local_sgd(H=1)")
    train([first, second], 3)
    for one in (first, second):
        one.outer.group.rounds.step += 1  # as after a round that led to nothing
    train([first, second], 4)
    second.outer.close()
    second = Worker(1, 2, tmp_path, spec="local_sgd(H=1)")
    assert (second.outer.rounds, second.outer.steps, second.outer.group.rounds.step) == (4, 4, 5)
    close([first, second])


def test_a_worker_that_joins_twice_is_there_once(tmp_path: Path) -> None:
    """Both went on, and took each other's place at the other workers in every round."""
    workers = elastic_workers(2, tmp_path, spec="local_sgd(H=1)")
    train(workers, 2)
    again = Worker(1, 2, tmp_path, spec="local_sgd(H=1)")
    edges = workers[0].outer.group.mesh.edges
    edge = edges.by_peer[1]
    deadline = time.monotonic() + TIMEOUT
    while workers[1].outer.group.mesh._connector.successor is None and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(RuntimeError, match="another process has joined as rank 1"):
        workers[1].train(3)
    assert edges.by_peer[1] is edge  # the first one did not take the connection back
    train([workers[0], again], 5)
    assert again.outer.group.rounds.members == (0, 1) and again.outer.group.missed == 0
    close([workers[0], again])


@pytest.mark.parametrize("slow", ["offer", "answer"])
def test_workers_that_are_connected_again_go_on_together(slow: str, tmp_path: Path, monkeypatch: Any) -> None:
    """They knew each other's round, went on before they had agreed on it, and each trained alone."""
    workers = first, second = elastic_workers(2, tmp_path, spec="local_sgd(H=1)")
    train(workers, 2)
    offering, answering = (one.outer.group.mesh._agreement for one in workers)
    offer, handle = offering._offer, answering.handle
    if slow == "offer":
        monkeypatch.setattr(offering, "_offer", lambda edge: time.sleep(0.3) or offer(edge))
    else:
        late = {FrameKind.OFFER: 0.3}
        monkeypatch.setattr(answering, "handle", lambda *frame: time.sleep(late.get(frame[1], 0)) or handle(*frame))
    edges = first.outer.group.mesh.edges
    edge = edges.by_peer[1]
    second.outer.group.mesh.drop(0, "is out of reach")
    with edges.changed:
        assert edges.changed.wait_for(lambda: not edge.alive, TIMEOUT)
    train(workers, 5)
    assert [one.outer.group.rounds.members for one in workers] == [(0, 1)] * 2
    assert [(one.outer.group.missed, one.outer.group.resyncs) for one in workers] == [(0, 0), (0, 1)]  # as it began
    close(workers)


def test_a_leader_that_dies_before_its_decision_costs_the_others_nothing(tmp_path: Path) -> None:
    workers = elastic_workers(3, tmp_path, spec="local_sgd(H=1)")
    check_round(workers)
    leader, *others = workers
    assert others[0].outer.group.rounds.leader == 0
    exchange = leader.outer.group.mesh.exchange

    def die(step: int, index: int, out: Any) -> Any:
        if index < 2:
            return exchange(step, index, out)
        leader.outer.group.mesh.edges.closed = True
        with leader.outer.group.mesh.edges.changed:
            for edge in leader.outer.group.mesh.edges.live():
                leader.outer.group.mesh.edges.drop(edge)
        raise KeyboardInterrupt

    leader.outer.group.mesh.exchange = die
    fixtures.loss(leader.net, 0, 1).backward()
    leader.optimizer.step()

    def dying() -> None:
        with pytest.raises(KeyboardInterrupt):
            leader.outer()

    check_round(others, (dying,))
    assert [(one.outer.group.missed, one.outer.group.resyncs) for one in others] == [(1, 1), (1, 1)]
    close(workers)


def test_workers_go_on_from_their_own_states_bit_for_bit(tmp_path: Path) -> None:
    through = elastic_workers(2, tmp_path / "one")
    train(through, 5)  # inside a round
    states = [one.outer.state_dict() for one in through]
    moments = [deepcopy(one.optimizer.state_dict()) for one in through]
    again = elastic_workers(2, tmp_path / "two")
    together(*(lambda one=one: one.outer.load_state_dict(states[one.rank]) for one in again))
    for one in again:
        one.optimizer.load_state_dict(moments[one.rank])
    train(again, 10)
    train(through, 10)
    for one, other in zip(through, again, strict=True):
        assert fixtures.same(one.outer.state_dict(), other.outer.state_dict())
        assert other.outer.group.missed == 0
    close([*through, *again])


def test_an_earlier_state_of_the_same_worker_is_gone_on_from_at_its_own_round(tmp_path: Path) -> None:
    worker = Worker(0, 1, tmp_path, spec="local_sgd(H=2)").train(4)
    state = worker.outer.state_dict()
    later = worker.train(10).outer.group.rounds.history
    worker.outer.load_state_dict(state)
    worker.train(5)  # inside a round
    assert worker.outer.group.rounds.step == 2 and worker.outer.group.rounds.history != later
    assert worker.train(6).outer.group.rounds.step == 3
    worker.outer.close()


def test_rounds_that_are_repeated_have_another_history(tmp_path: Path) -> None:
    """Equal histories mean equal weights, and the inner optimizer may go on from others than before."""
    worker = Worker(0, 1, tmp_path, spec="local_sgd(H=2)").train(2)
    state, histories = worker.outer.state_dict(), set()
    for _ in range(2):
        worker.outer.load_state_dict(state)
        assert worker.train(4).outer.group.rounds.step == 2
        histories.add(worker.outer.group.rounds.history)
    assert len(histories) == 2
    worker.outer.close()


def test_a_history_begins_with_the_momentum_too(tmp_path: Path) -> None:
    worker = Worker(0, 1, tmp_path, spec="diloco(H=1)").train(2)
    state, histories = worker.outer.state_dict(), []
    momentum = next(name for name in state if name.startswith("local/optimizer/momentum_buffer/"))
    for number in (state[momentum], state[momentum], state[momentum] + 1):
        worker.outer.load_state_dict({**state, momentum: number})
        histories.append(worker.outer.group.rounds.history)
    assert histories[0] == histories[1] != histories[2]
    worker.outer.close()


def test_steps_of_a_round_that_was_given_up_are_not_counted(tmp_path: Path) -> None:
    """The worker loads a state from inside a round while the group is further."""
    workers = elastic_workers(2, tmp_path, spec="local_sgd(H=2)")
    train(workers, 3)
    state = workers[1].outer.state_dict()
    train(workers, 8)
    before = workers[1].outer.report().local_steps
    workers[1].outer.load_state_dict(state)
    assert workers[1].outer.steps == 8 and workers[1].outer.group.resyncs == 2
    train(workers, 10)
    assert workers[1].outer.report().local_steps == before + 2
    close(workers)


def test_a_worker_loads_its_own_file_where_rank_0_has_none(tmp_path: Path) -> None:
    workers = elastic_workers(2, tmp_path, spec="local_sgd(H=1)")
    train(workers, 2)
    gradwire.save(workers[1].outer, tmp_path / "saved")
    gradwire.load(workers[1].outer, tmp_path / "saved")
    assert fixtures.same(workers[1].weights(), workers[0].weights()) and workers[1].outer.steps == 2
    close(workers)


def test_a_state_of_a_process_group_begins_a_group(tmp_path: Path) -> None:
    net = fixtures.model(seed=3)
    before = gradwire.local(net, adamw(net), "local_sgd(H=2)", "int8", exchange="allgather", bundle=None)
    worker = Worker(0, 1, tmp_path, spec="local_sgd(H=2)", codec="int8")
    worker.outer.load_state_dict(before.state_dict())
    assert fixtures.same(worker.weights(), {name: x.detach() for name, x in net.named_parameters()})
    assert worker.train(2).outer.group.rounds.step == 1
    worker.outer.close()


# -- who counts --------------------------------------------------------------------------------------------------------


def test_the_leader_is_the_oldest_of_the_history_that_most_have() -> None:
    ballots = {rank: Ballot(since, history, ()) for rank, (since, history) in enumerate([(0, "a"), (4, "b"), (0, "b")])}
    assert leader_of(ballots) == 2
    assert leader_of({0: Ballot(5, "a", ()), 1: Ballot(2, "a", ())}) == 1
    assert leader_of({0: Ballot(5, "a", ()), 1: Ballot(2, "b", ())}) == 1


@pytest.mark.parametrize(
    ("heard", "members"),
    [
        ({0: (0, 1, 2), 1: (0, 1, 2), 2: (0, 1, 2)}, (0, 1, 2)),
        ({0: (0, 1, 2), 1: (0, 1), 2: (0, 2)}, (0, 1)),  # a worker that joins has no edge to 1 yet
        ({0: (0, 1), 1: (0, 1, 2), 2: (1, 2)}, (0, 1)),
        ({0: (0,)}, (0,)),
    ],
)
def test_those_count_who_all_have_heard(heard: dict[int, tuple[int, ...]], members: tuple[int, ...]) -> None:
    ballots = {rank: Ballot(7 * (rank == 2), "same", others) for rank, others in heard.items()}
    assert members_of(ballots, 0) == members
    other = {**ballots, 1: ballots[0]._replace(history="other")}
    assert 1 not in members_of(other, 0)


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"spec": "diloco(H=3, start=2)"}, "start=2"),
        ({"spec": "diloco(H=3, delay=2)"}, "delay=2"),
        ({"spec": "streaming_diloco(H=4, fragments=2, delay=0)"}, "fragments=2"),
        ({"spec": "local_schedule({0: diloco(H=2), 4: diloco(H=4)})"}, "is a local_schedule"),
        ({"codec": "int8", "exchange": "two_way"}, "two_way"),
        ({"spec": "local_sgd(H=2)", "codec": "topk(0.1)", "feedback": "ef21"}, "ef21"),
        ({"rollback": False}, "rollback"),
        ({"uneven": True}, "uneven"),
        ({"across": "hosts"}, "across"),
        ({"timeout": 0.0}, "timeout"),
        ({"meeting": None}, "meeting"),
    ],
)
def test_what_is_not_elastic_is_refused(options: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=named):
        Worker(0, 1, tmp_path, **options)


def test_a_rank_outside_of_the_world_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rank=1 is none of world=1"):
        Worker(1, 1, tmp_path)


def test_an_elastic_group_keeps_its_rounds(tmp_path: Path) -> None:
    worker = Worker(0, 1, tmp_path).train(2)
    with pytest.raises(ValueError, match="start all workers again"):
        worker.outer.set("diloco(H=3)")
    with pytest.raises(ValueError, match="start all workers again"):
        worker.outer.off()
    worker.outer.close()
