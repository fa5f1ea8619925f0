"""Elastic net: gossip that goes on when neighbors die or stall, and takes them back."""

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from gradwire.comm.peer_mesh import OFF_THE_RECORD, PeerMesh, Snapshot
from gradwire.comm.rendezvous import meeting as as_meeting
from gradwire.core.payload import CorruptMessageError, Payload, as_bytes
from gradwire.core.requests import CommGenerator, SendRecv
from gradwire.gossip import Gossip
from gradwire.integrations.gossip.checkpoint import check_state, save_state
from gradwire.integrations.gossip.crossing import Crossing
from gradwire.integrations.gossip.flat_params import CodecSpec, Flat, describe, make_node, show
from gradwire.integrations.gossip.report import GossipReport, summarize

T = TypeVar("T")

TRIES = 5  # to find a neighbor that lives long enough to be copied
_log = logging.getLogger("gradwire.gossip")


class ElasticGossip:
    """Gossips one model's parameters with whichever neighbors are there. Call it after ``optimizer.step()``.

    A lost neighbor's weight returns to its owner. If only one end of an edge finished its last round, the mean model
    has moved by what flowed over it, over the number of ranks; the last flow that is known is logged, and `report` adds
    them up. Who comes back, or was left behind, takes a neighbor's parameters and step, and both ends of each of its
    edges then exchange theirs whole.

    Attributes:
        step: Steps taken by the group, as far as this rank knows; it jumps when the rank rejoins.
        taken: How often this rank has taken over a neighbor's parameters, buffers and step.
        made: Rounds that this rank has made itself, and
        told: letters that it has sent in them, one to each neighbor that was there.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: str | Gossip,
        codec: CodecSpec | None,
        rank: int,
        world: int,
        meeting: str | Path,
        *,
        granularity: str = "layer",
        overlap: bool = False,
        seed: int = 0,
        timeout: float = 30.0,
        host: str = "127.0.0.1",
    ) -> None:
        if timeout <= 0.0:
            raise ValueError(f"timeout={timeout} leaves neighbors no time to answer; give it some seconds")
        self.flat, self.world = Flat(model), world
        self.node = make_node(self.flat, spec, codec, rank, world, granularity, seed, overlap, elastic=True)
        self.said = describe(self.node, granularity)
        self.drift, self.rejoined, self.taken, self._noted = 0.0, 0, 0, 0
        self.made = self.told = 0
        self._known: set[int] = set()  # neighbors that have ever taken part
        self._present: tuple[int, ...] = ()  # who took part in the last round
        self._polls = (-1, 0)  # a step, and how often everybody was asked in it
        self._crossing: Crossing[tuple[Tensor, Tensor]] = Crossing(self.flat.device)
        whole = f"{self.said}; seed {seed}; world {world}; {self.flat.fingerprint().tolist()}"
        digest = hashlib.sha256(whole.encode()).digest()
        self._neighbors = tuple(self.node.topology.peers(rank))
        self.peers = PeerMesh(rank, self._neighbors, as_meeting(meeting), digest, timeout=timeout, host=host)
        try:
            self._join()
        except BaseException:
            self.close()
            raise
        self.node.begin(self.flat.read())

    def __repr__(self) -> str:
        return show("ElasticGossip", self.said, self.node, self.node.step, self.node.rank)

    def __call__(self) -> None:
        """Average with the neighbors that are there; with ``overlap=True``, what they say comes a step late."""
        self.land()
        if self.peers.left_behind(self.node.step, slack=self.world):
            self._join()
        if not self.node.overlap:
            self.flat.write_(self._round(self.flat.read(), self._buffers()))
            return
        x, buffers = self.node.depart(self.flat.read()), self._buffers()
        self.flat.write_(x)
        self._crossing.board(lambda: (x, self._round(x, buffers)))

    def _round(self, x: Tensor, buffers: Tensor) -> Tensor:
        step = self.node.step
        live = self.peers.begin(step)
        self._welcome(live, step)
        self._mourn(step)  # now, while flows are those of the last round
        met = self._talk(self.node.run(x, live), step)
        self._mourn(step)
        self._present = tuple(live)
        self.made += 1
        self.told += len(live)
        self.peers.done(step, _snapshot(met, buffers))
        return met

    def _welcome(self, live: Mapping[int, bool], step: int) -> None:
        for peer, new in live.items():
            if new and peer in self._known:
                self.rejoined += 1
                _log.info("rank %d has neighbor %d back at step %d", self.node.rank, peer, step)
            self._known.add(peer)

    def _mourn(self, step: int) -> None:
        """Log the neighbors lost since the last round, and what may have flowed one way only."""
        lost = self.peers.lost[self._noted :]
        self._noted += len(lost)
        for peer in lost:
            flow = float(self.node.flows.pop(peer, 0.0)) / self.world
            self.drift += flow
            _log.warning(
                "rank %d lost neighbor %d before the end of step %d; the mean model may have moved by about %.3g",
                *(self.node.rank, peer, step, flow),
            )

    def land(self) -> None:
        """Wait until nothing is under way."""
        landed = self._crossing.land()
        if landed is not None:
            self.node.arrive(*landed)

    def _talk(self, talk: CommGenerator[Tensor], step: int) -> Tensor:
        answer: Any = None
        leg = 0
        try:
            while True:
                ask = talk.send(answer)
                assert isinstance(ask, SendRecv)
                out = {peer: payload.data.cpu().numpy().tobytes() for peer, payload in ask.out.items()}
                out.pop(self.node.rank, None)  # with nobody there, a node tells itself nothing
                heard = self.peers.swap(step, leg, out)
                answer = {peer: self._payload(body) for peer, body in heard.items()}
                leg += 1
        except StopIteration as done:
            met: Tensor = done.value
            return met

    def _payload(self, body: bytes) -> Payload:
        return Payload(torch.frombuffer(bytearray(body), dtype=torch.uint8).to(self.flat.device))

    def _join(self, resumes: bool = False) -> None:
        """Take over what a neighbor holds, if one is ahead, and let all know that I am there.

        Args:
            resumes: Whether copies are those of this step, so that edges may go on where both ends have the same.
        """
        for _ in range(TRIES):
            ahead = self.peers.meet(self.node.step)
            if ahead is None:
                break
            if self._take(ahead):
                resumes = False
                break
        if self.node.step == 0:
            self._take_root()
            resumes = False
        marks = self._marks() if resumes else {}
        self.peers.settle(self.node.step, _snapshot(self.flat.read(), self._buffers()), marks)

    def _marks(self) -> dict[int, bytes]:
        """A digest of each edge's copies, equal at both ends if these are: the lower rank's copy comes first."""
        marks = {}
        for peer in self._neighbors:
            names = (f"to_{peer}", f"from_{peer}") if self.node.rank < peer else (f"from_{peer}", f"to_{peer}")
            copies = (self.node.memory[name] for name in names if name in self.node.memory)
            marks[peer] = hashlib.sha256(b"".join(as_bytes(x).cpu().numpy().tobytes() for x in copies)).digest()
        return marks

    def _take(self, peer: int) -> bool:
        """Become a copy of a neighbor, if it lives long enough."""
        state = self.peers.pull(peer)
        if state is None:
            return False
        if self.node.step:
            _log.warning(
                "rank %d was at step %d, and takes parameters and step %d of neighbor %d",
                *(self.node.rank, self.node.step, state[0], peer),
            )
        self.peers.hang_up()  # edges that were agreed on for my old step are of no use
        self._adopt_(self._payload(state[1]).data.view(torch.float32))
        self.node.step = self.node.number = state[0]
        self.node.pending = None  # it was meant for other parameters
        self.taken += 1
        return True

    def _take_root(self) -> None:
        """Start from rank 0's parameters: each rank from a neighbor that is nearer to rank 0."""
        distances = self.node.topology.distances(0)
        nearer = [peer for peer in self._neighbors if distances[peer] < distances[self.node.rank]]
        if nearer and not any(self.peers.await_peer(peer) and self._take(peer) for peer in nearer):
            raise RuntimeError(
                f"rank {self.node.rank} found no neighbor that has the parameters of rank 0 in {self.peers.timeout} s: "
                f"none of {nearer}; start rank 0 and those in time, or give timeout= more"
            )
        self.peers.show(self.node.step, _snapshot(self.flat.read(), self._buffers()))

    def _adopt_(self, whole: Tensor) -> None:
        buffers = list(self.flat.buffers.values())
        x, *parts = whole.split([self.flat.tensors.total, *(buffer.numel() for buffer in buffers)])
        self.flat.write_(x)
        with torch.no_grad():
            for buffer, part in zip(buffers, parts, strict=True):
                buffer.copy_(part.view(buffer.shape))

    def _buffers(self) -> Tensor:
        """Floating-point buffers as one vector: a copy, since training goes on."""
        return torch.cat(
            [
                torch.zeros(0, device=self.flat.device),
                *(b.detach().flatten().float() for b in self.flat.buffers.values()),
            ]
        )

    # -- the mean model ------------------------------------------------------------------------------------------------

    def everybody(self) -> dict[int, Tensor]:
        """Parameters and floating-point buffers of every rank that can be reached, by rank."""
        self.land()
        return self.reach(torch.cat((self.flat.read(), self._buffers())))

    def reach(self, mine: Tensor) -> dict[int, Tensor]:
        """What every rank that can be reached gives, tensors of one shape, by rank.

        They travel whole from neighbor to neighbor, off the account. All ranks must call it at the same step: one that
        does not is waited for as for a dead one.
        """
        self.land()
        known, fresh = {self.node.rank: mine}, {self.node.rank: mine}
        step = self.node.step
        self._polls = step, self._polls[1] + 1 if self._polls[0] == step else 0
        for turn in range(self.world - 1):  # no path is longer
            leg = OFF_THE_RECORD + self._polls[1] * self.world + turn
            heard = self.peers.swap(step, leg, dict.fromkeys(self._present, _pack(fresh)))
            told = {rank: x for body in heard.values() for rank, x in _unpack(body, mine).items()}
            fresh = {rank: x for rank, x in told.items() if rank not in known}
            known |= fresh
        return dict(sorted(known.items()))

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The model holds the mean over all ranks that can be reached in here. All of them must call it."""
        everybody = self.everybody()
        mine = torch.cat((self.flat.read(), self._buffers()))
        self._adopt_(torch.stack(list(everybody.values())).mean(0))
        try:
            yield
        finally:
            self._adopt_(mine)

    def evaluate_mean(self, evaluate: Callable[[], T]) -> T:
        """What ``evaluate()`` returns while the model holds the mean. All ranks must call it, at the same step."""
        with self.averaged():
            return evaluate()

    def distance(self) -> float:
        """The root mean square of |x_i - mean| over all ranks that can be reached. All of them must call it."""
        total = self.flat.tensors.total
        rows = torch.stack([x[:total] for x in self.everybody().values()]).double()
        return float((rows - rows.mean(0)).square().sum(1).mean().sqrt())

    # -- what is kept and shown ----------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        return self.node.rank

    @property
    def step(self) -> int:
        self.land()
        return self.node.step

    def state_dict(self) -> dict[str, Tensor]:
        """Copies, gamma and step."""
        self.land()
        return save_state(self.node, self.flat, self.said, self.world)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over this rank's own state, and join the group at its step, or at the group's if that is further.

        An edge goes on as it was if both its ends come back with the same step and copies, within `timeout` of each
        other; any other begins anew, with whole parameters.
        """
        self.land()
        check_state(state, self.node, self.flat, self.said, self.world)
        self.node.load(state)
        self.node.step = self.node.number = int(state["gradwire/step"])
        self.peers.hang_up()
        self._join(resumes=True)
        self._noted = len(self.peers.lost)
        self.node.flows.clear()

    def report(self) -> GossipReport:
        """Bytes, distance, memory, gamma and losses so far."""
        self.land()
        losses = {"dropped": len(self.peers.lost), "rejoined": self.rejoined, "drift": self.drift}
        report = summarize(self.node, self.peers.traffic, self.world, **losses)
        dense = self.node.method.uncompressed(self.flat.tensors.total, self.told, self.world)
        shown = sum(buffer.numel() for buffer in self.flat.buffers.values()) / max(1, self.flat.tensors.total) + 1
        return replace(report, dense=dense, memory_floats=report.memory_floats + shown)

    def close(self) -> None:
        """Leave the group."""
        try:
            self.land()
        finally:
            self.peers.close()


def _snapshot(x: Tensor, buffers: Tensor) -> Snapshot:
    """Parameters and buffers, made into bytes only if somebody asks."""
    return lambda: as_bytes(torch.cat((x, buffers))).cpu().numpy().tobytes()


def _pack(vectors: Mapping[int, Tensor]) -> bytes:
    """Rank by rank: a uint32, then the vector; all have the same length."""
    return b"".join(rank.to_bytes(4, "little") + as_bytes(x).cpu().numpy().tobytes() for rank, x in vectors.items())


def _unpack(body: bytes, like: Tensor) -> dict[int, Tensor]:
    size = 4 + like.element_size() * like.numel()
    if len(body) % size:
        raise CorruptMessageError(
            f"a neighbor sent {len(body)} bytes of models, where each takes {size}; has it another model?"
        )
    found = {}
    for at in range(0, len(body), size):
        data = torch.frombuffer(bytearray(body[at + 4 : at + size]), dtype=torch.uint8).view(like.dtype)
        found[int.from_bytes(body[at : at + 4], "little")] = data.view_as(like).to(like.device)
    return found
