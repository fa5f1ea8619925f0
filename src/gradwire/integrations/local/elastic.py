"""Local steps of an elastic group: rounds go on when workers die or stall, and workers come back or join."""

import hashlib
import logging
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load, save
from torch import Tensor

from gradwire.comm.backend import UncountedBackend, copied_to, delegated, of_one_rank
from gradwire.comm.collectives import Collective
from gradwire.comm.elastic_rounds import ElasticRounds
from gradwire.comm.peer_mesh import PeerMesh
from gradwire.core import byte_tensor, raw_bytes
from gradwire.engine import StepResult, execute
from gradwire.exchanges import AllGather, AllReduce, Auto
from gradwire.integrations.elastic_place import ElasticPlace
from gradwire.integrations.local.elastic_message import MissedRound, RoundTransport, in_one_message
from gradwire.integrations.setup import Options
from gradwire.integrations.wire import Wire
from gradwire.local.method import LocalMethod

if TYPE_CHECKING:
    from gradwire.integrations.local.handle import LocalSync

_SMALL_BYTES = 2**20  # ballots, names and headers
_MANY_STATES = 4  # a worker that joins takes over one or two
_STATES = 6  # float32 vectors of a state at most: weights, and slots of their optimizer
_log = logging.getLogger("gradwire.local")


class ElasticLink(UncountedBackend):
    """The link of a worker outside of rounds, where it needs no agreement. Its bytes are those of the mesh."""

    traffic = delegated("edges", "traffic")

    def __init__(self, mesh: PeerMesh, world: int) -> None:
        self.edges, self.rank, self.world = mesh.edges, mesh.rank, world

    def move(self, collective: Collective, out: Tensor | None = None) -> Tensor:
        return copied_to(of_one_rank(collective), out)


class ElasticGroup:
    """One worker's place among those that are there, which come and go.

    A worker that comes back, joins, or has missed a round takes over a member's outer weights, with their momentum, and
    starts from them; its own error stays.

    Attributes:
        rounds: Who counts in a round.
        link: What the handle takes for the network.
        lock: Of the outer weights: threads of the mesh read them.
        missed: Rounds in which the difference of this worker did not count.
        resyncs: How often it has taken over another worker's outer weights.
    """

    def __init__(self, place: ElasticPlace, training: str, numbers: int) -> None:
        others, training = {*range(place.world)} - {place.rank}, f"local steps; {training}; world {place.world}"
        self.mesh = place.connect(sorted(others), training, _SMALL_BYTES + 4 * _STATES * numbers)
        self.link, self.rounds = ElasticLink(self.mesh, place.world), ElasticRounds(self.mesh)
        self.missed = self.resyncs = 0
        self._taken = 0  # states that were taken over since this worker last counted in a round
        self._base = 0, 0  # steps and rounds of the handle, when its last round ended
        self.lock = threading.Lock()

    # -- a round -------------------------------------------------------------------------------------------------------

    def exchange(self, wire: Wire, differences: dict[str, Tensor], buffers: Tensor) -> StepResult:
        """A round of the workers that are there; one that was missed leads to nothing."""
        self.mesh.yield_to_successor()
        before = self.rounds.members
        for _ in range(self.link.world):
            if self._is_left_behind() and self._join():
                break
            _renumber(wire, self.rounds.step)
            wire.setup.check_model()
            step = in_one_message(wire.engine.unwrapped, differences, buffers, self._handle.outer)
            try:
                result = execute(step, RoundTransport(self.rounds, self.link.world), wire.clock)
            except MissedRound:
                self.missed += 1
            else:
                self._taken = 0
                self._warn_if_alone({*before})
                return result
            leader = self.rounds.leader  # who may be gone
            if leader is not None and leader != self.rounds.rank and self._copy(leader, at_least=self.rounds.step):
                break
        return StepResult({}, skipped=True)

    def _warn_if_alone(self, before: set[int]) -> None:
        """Weights of workers that each train alone drift apart, and no error would ever say so."""
        others = sorted(before - {self.rounds.rank})
        if others and self.rounds.members == (self.rounds.rank,):
            _log.warning(
                "rank %d makes round %d alone, without %s; if they run, their messages take longer than timeout=%g s",
                *(self.rounds.rank, self.rounds.step, others, self.mesh.timeout),
            )

    def arrive(self) -> None:
        """The outer weights are those of after the round, and the lock is held."""
        self.rounds.commit()
        if not self._handle.inside:
            self._base = self._handle.steps, self._handle.rounds
            self.mesh.publish(self.rounds.step, self._snapshot)

    def _is_left_behind(self) -> bool:
        """Whether others are further: a worker whose round would be its own asks them.

        It waits once for the members that it has lost. Where others have come back from a part of the group that the
        network had cut off, and that has gone on, what they announced is enough: those of one part are closer.
        """
        with self.mesh.edges.changed:
            if self.mesh.edges.furthest(self.rounds.step + self.link.world) is not None:
                return True
        if not self.mesh.is_cut_off(self.rounds.step):
            return False
        lost, self.rounds.members = self.rounds.members, (self.rounds.rank,)
        return self.mesh.ask(self.rounds.step, lost)

    # -- joining -------------------------------------------------------------------------------------------------------

    def begin(self, handle: "LocalSync") -> None:
        """Take over what a member holds; where nobody has begun, what rank 0 has."""
        self._handle = handle
        _check_lanes(handle.wire)
        self._restate()
        if self._join():
            return self._restart()
        if self.rounds.rank and not (self.mesh.await_peer(0) and self._copy(0, at_least=0)):
            raise RuntimeError(
                f"rank {self.rounds.rank} found no worker with weights in {self.mesh.timeout} s; start rank 0 in time, "
                "or give timeout= more"
            )
        self._restart()
        self.mesh.join(self.rounds.step, self._snapshot)

    def _join(self) -> bool:
        """Join the group where it is further than this worker. Returns whether it was."""
        step = self.rounds.step
        ahead = self.mesh.catch_up(step, lambda peer: self._copy(peer, at_least=step + 1))
        if ahead is None:
            return False
        self.mesh.leave()  # edges that were agreed on for an earlier round are of no use
        self.mesh.join(self.rounds.step, self._snapshot)
        # Others may have begun the round of the state meanwhile; then this worker is awaited in a later one, and while
        # it waits for the state of that, its threads agree to no earlier one.
        starts = self.mesh.await_edges(self.rounds.members, self.mesh.timeout / 10)
        self.mesh.begin(min(starts.values(), default=self.rounds.step) - 1)
        first = min(self.mesh.await_edges((), 0.0).values(), default=0)
        if first > self.rounds.step:
            self._copy(ahead, at_least=first)
        return True

    def _copy(self, peer: int, at_least: int) -> bool:
        """Take over a worker's outer weights, once it has come to some round, if it lives long enough."""
        answer = self.mesh.pull(peer, at_least)
        if answer is None:
            return False
        self._take(load(answer[1]), peer)
        return True

    def _take(self, state: Mapping[str, Tensor], peer: int) -> None:
        handle = self._handle
        with self.lock:
            handle.outer.load_state_dict(state)
            handle.outer.load_remaining_tensors(state)
            self.rounds.take(int(state["round"]), raw_bytes(state["history"]).decode())
            self.rounds.members = (*state["members"].tolist(), self.rounds.rank)
            self._base = handle.steps, handle.rounds = int(state["steps"]), int(state["rounds"])
        handle.inside = handle.fragments[0].age = 0
        self.resyncs, self._taken = self.resyncs + 1, self._taken + 1
        if self._taken % _MANY_STATES == 0:
            _log.warning(
                "rank %d has taken over %d states, and counted in no round between them; a state takes perhaps longer "
                "than timeout=%g s to arrive, so give more",
                *(self.rounds.rank, self._taken, self.mesh.timeout),
            )
        _log.info("rank %d takes over round %d of rank %d", self.rounds.rank, self.rounds.step, peer)

    def _snapshot(self) -> bytes:
        """What a worker that joins needs."""
        outer, rounds = self._handle.outer, self.rounds
        with self.lock:
            steps, made = self._base
            numbers = {"round": rounds.step, "steps": steps, "rounds": made, "members": rounds.members}
            about = {name: torch.tensor(value) for name, value in numbers.items()}
            history = byte_tensor(rounds.history.encode())
            return save({**outer.state_dict(), **outer.remaining_tensors(), **about, "history": history})

    def _restate(self) -> None:
        """A history that begins with the weights and their optimizer as they are."""
        held = b"".join(raw_bytes(x) for x in self._handle.outer.state_dict().values())
        self.rounds.history = hashlib.sha256(f"{self.rounds.step}".encode() + held).hexdigest()[:32]

    def _restart(self) -> None:
        self._handle.outer.restart()
        self._handle.outer.restart_buffers()

    def resume(self, state: Mapping[str, Tensor]) -> None:
        """The handle has loaded a state: continue from there, or from where the group is, if that is further.

        A state that was saved over a process group has no round, and begins with that of this worker.
        """
        self.mesh.leave()
        with self.lock:
            self._base = self._handle.steps - self._handle.inside, self._handle.rounds
            self.rounds.step = int(state.get("round", self.rounds.step))
            self._restate()
            self.rounds.take(self.rounds.step, self.rounds.history)  # what was agreed on before is of no use
        if self._join():
            self._restart()
        else:
            self.mesh.join(self.rounds.step, self._snapshot)


def _renumber(wire: Wire, step: int) -> None:
    """Random bits are those of the group's round; the account of this worker continues."""
    inner = wire.engine.unwrapped
    wire.first_step += step - inner.step
    inner.step = step


def elastic_method(chosen: LocalMethod, options: Options) -> LocalMethod:
    """The method with messages that all receive; what has no such rounds is refused."""
    if chosen.start or chosen.delay or chosen.fragments != 1 or chosen.later:
        parts = f"start={chosen.start}, delay={chosen.delay} and fragments={chosen.fragments}"
        raise ValueError(
            "elastic=True has rounds of the whole model from the first step on, applied at once, and this one "
            f"{'is a local_schedule' if chosen.later else f'has {parts}'}; write 0, 0, 1 and no local_schedule, or "
            "leave elastic out"
        )
    if not options.rollback:
        raise ValueError("elastic=True keeps errors of rounds that were missed; leave rollback=False out")
    message = chosen.message
    return replace(chosen, message=replace(message, exchange=AllGather())) if type(message.exchange) is Auto else chosen


def _check_lanes(wire: Wire) -> None:
    for lane in wire.engine.full_plan.lanes:
        for _, _, exchange in lane.step_table:
            if not isinstance(exchange, AllGather | AllReduce):
                raise ValueError(
                    f"elastic=True needs messages that all receive, and {exchange} has others; use exchange='allgather'"
                )
        if lane.feedback.finalize is not None:
            raise ValueError(
                f"{lane.feedback} keeps a mean that all ranks share, and elastic=True has workers that miss "
                "rounds; use feedback='residual'"
            )
