"""Elastic rounds: all-gathers over the workers that are there, which may die, stall and come back.

Every worker has an edge to every other one (`peer_mesh`). A round has three exchanges:

    0    all send their message to all
    1    all send a ballot: whose messages they have, of which history they are, and since when they are members
    2    one of them, the leader, sends who counts

Workers hold the same state if they have the same history, a hash of all decisions. The leader is the oldest member of
the history that most have. Those count who have its history, and of whom each has the messages of all others. A worker
that does not count, or receives no decision, has missed the round. It takes over the leader's state. If the leader is
lost, perhaps no worker has a decision, and the round is tried again.
"""

import hashlib
import json
import secrets
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

from gradwire.comm.peer_mesh import PeerMesh

T = TypeVar("T")


class Ballot(NamedTuple):
    """What a worker sends to the others.

    Attributes:
        since: The round in which it became a member.
        history: Which state it holds.
        received: Whose messages it has, its own among them.
    """

    since: int
    history: str
    received: tuple[int, ...]


class RoundDecision(NamedTuple):
    """What the leader sends to the others. These send an empty one.

    Attributes:
        nonce: A random one, since a worker that has loaded an earlier state may repeat its rounds with other messages.
        members: The ranks whose messages count; none where this worker does not lead.
    """

    nonce: str = ""
    members: tuple[int, ...] = ()


class ElasticRounds:
    """One worker's place in the group.

    Attributes:
        step: The number of the next round.
        history: Which state this worker holds.
        since: The round in which it became a member.
        members: Those who counted in the last round.
        leader: Whose state this worker takes over if it has missed the round; None if the round is to be tried again.
    """

    def __init__(self, mesh: PeerMesh) -> None:
        self.mesh, self.rank = mesh, mesh.rank
        self.step = self.since = 0
        self.history = ""
        self.members: tuple[int, ...] = (mesh.rank,)
        self.leader: int | None = None
        self._next = 0, ""  # step and history, once what was agreed on is applied

    def exchange(self, message: bytes, fits: Callable[[bytes], bool]) -> dict[int, bytes] | None:
        """One round. Returns the messages that count, by rank; None if this worker has missed it.

        Call `commit` when the state is what these messages make of it.

        Args:
            message: Of this worker.
            fits: Whether a message may be another worker's; a worker that sends anything else is dropped.
        """
        step, self.leader = self.step, None
        live = self.mesh.begin(step)
        others = self.mesh.exchange(step, 0, dict.fromkeys(live, message))
        messages = {self.rank: message, **self._kept(others, fits)}
        mine = Ballot(self.since, self.history, tuple(sorted(messages)))
        ballots = {self.rank: mine, **self._read(self._to_others(1, messages, json.dumps(mine)), _ballot)}
        leader, own = leader_of(ballots), RoundDecision()
        if leader == self.rank:
            own = RoundDecision(secrets.token_hex(8), members_of(ballots, leader))
        decisions = {self.rank: own, **self._read(self._to_others(2, ballots, json.dumps(own)), _decision)}
        decision = decisions.get(leader, RoundDecision())
        # A worker that others do not follow has no decision to send, but what this one has missed.
        self.leader = leader if decision.members or ballots[leader].history != self.history else None
        members = decision.members
        if self.rank not in members or not {*members} <= messages.keys():
            self.step += 1
            return None
        self.members, self._next = members, (step + 1, next_history(self.history, step, decision))
        return {rank: messages[rank] for rank in members}

    def commit(self) -> None:
        """The round is over, and the state is the new one."""
        if self._next[0] > self.step:
            self.step, self.history = self._next

    def take(self, step: int, history: str) -> None:
        """The state is now that of another worker, with its step and history."""
        self.step = self.since = step
        self.history, self._next = history, (step, history)

    def _to_others(self, index: int, ranks: Mapping[int, object], text: str) -> dict[int, bytes]:
        return self.mesh.exchange(self.step, index, {rank: text.encode() for rank in ranks if rank != self.rank})

    def _kept(self, received: Mapping[int, bytes], fits: Callable[[bytes], bool]) -> dict[int, bytes]:
        kept = {peer: body for peer, body in received.items() if fits(body)}
        for peer in received.keys() - kept.keys():
            self.mesh.drop(peer, "sent a message that does not fit the model")
        return kept

    def _read(self, received: Mapping[int, bytes], read: Callable[[bytes], T]) -> dict[int, T]:
        found = {}
        for peer, body in received.items():
            try:
                found[peer] = read(body)
            except (ValueError, TypeError):
                self.mesh.drop(peer, "sent no ballot or decision")
        return found


def _ballot(body: bytes) -> Ballot:
    since, history, received = json.loads(body)
    return Ballot(int(since), str(history), tuple(map(int, received)))


def _decision(body: bytes) -> RoundDecision:
    nonce, members = json.loads(body)
    return RoundDecision(str(nonce), tuple(map(int, members)))


def leader_of(ballots: Mapping[int, Ballot]) -> int:
    """The oldest member of the history that most workers have; of equally many, one with more connections has it."""
    sizes, reach = Counter(ballot.history for ballot in ballots.values()), Counter[str]()
    for ballot in ballots.values():
        reach[ballot.history] = max(reach[ballot.history], len(ballot.received))

    def order(rank: int) -> tuple[int, int, int, int]:
        history, since = ballots[rank].history, ballots[rank].since
        return -sizes[history], -reach[history], since, rank

    return min(ballots, key=order)


def members_of(ballots: Mapping[int, Ballot], leader: int) -> tuple[int, ...]:
    """Workers of the leader's history, older ones first, each of whom has the messages of all others."""
    alike = [rank for rank, ballot in ballots.items() if ballot.history == ballots[leader].history]
    chosen = [leader]
    for rank in sorted(alike, key=lambda rank: (ballots[rank].since, rank)):
        both_ways = (rank in ballots[other].received and other in ballots[rank].received for other in chosen)
        if rank != leader and all(both_ways):
            chosen.append(rank)
    return tuple(sorted(chosen))


def next_history(history: str, step: int, decision: RoundDecision) -> str:
    """Of the state that this round leads to."""
    return hashlib.sha256(f"{history} {step} {[*decision]}".encode()).hexdigest()[:32]
