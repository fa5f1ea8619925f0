"""Elastic net: gossip that goes on when neighbors die or stall, and takes them back."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from gradwire.adapters.gossip.checkpoint import check_state, save_state
from gradwire.adapters.gossip.crossing import Crossing
from gradwire.adapters.gossip.replica import CodecSpec, Flat, describe, make_node
from gradwire.adapters.gossip.report import GossipReport, summarize
from gradwire.core.asks import Swap, Talk
from gradwire.core.payload import Malformed, Payload, as_bytes
from gradwire.gossip import Gossip
from gradwire.links.meeting import meeting as as_meeting
from gradwire.links.peers import OFF_THE_RECORD, Peers, Snapshot

T = TypeVar("T")

TRIES = 5  # to find a neighbor that lives long enough to be copied


class ElasticNet:
    """Gossips one model's parameters with whichever neighbors are there. Call it after ``optimizer.step()``.

    A lost neighbor's weight returns to its owner. What is lost with it moves the mean model by no more than the last
    talk moved this replica, over the number of ranks; `report` adds that up. Who comes back, or was left behind, takes
    a neighbor's parameters and step, and both ends of each of its edges then exchange theirs whole.

    Attributes:
        step: Steps taken by the group, as far as this rank knows; it jumps when the rank rejoins.
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
        self.node.begin(self.flat.read())
        self.drift, self._noted = 0.0, 0
        self._present: tuple[int, ...] = ()  # who took part in the last round
        self._polls = (-1, 0)  # a step, and how often everybody was asked in it
        self._crossing: Crossing[tuple[Tensor, Tensor]] = Crossing(self.flat.device)
        whole = f"{self.said}; seed {seed}; world {world}; {self.flat.fingerprint().tolist()}"
        digest = hashlib.sha256(whole.encode()).digest()
        neighbors = self.node.topology.peers(rank)
        self.peers = Peers(rank, neighbors, as_meeting(meeting), digest, timeout=timeout, host=host)
        self._edges = 0
        try:
            self._join()
        except BaseException:
            self.close()
            raise
        self._edges = len(neighbors)

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
        before = float(self.node.moved)
        met = self._talk(self.node.run(x, live), step)
        if self.peers.dropped > self._noted:
            self.drift += before / self.world
            self._noted = self.peers.dropped
        self._present = tuple(live)
        self.peers.done(step, _snapshot(met, buffers))
        return met

    def land(self) -> None:
        """Wait until nothing is under way."""
        landed = self._crossing.land()
        if landed is not None:
            self.node.arrive(*landed)

    def _talk(self, talk: Talk[Tensor], step: int) -> Tensor:
        answer: Any = None
        leg = 0
        try:
            while True:
                ask = talk.send(answer)
                assert isinstance(ask, Swap)
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

    def _join(self) -> None:
        """Take over what a neighbor holds, if one is ahead, and let all know that I am there."""
        for _ in range(TRIES):
            ahead = self.peers.meet(self.node.step)
            if ahead is None:
                break
            state = self.peers.pull(ahead)
            if state is not None:
                self.peers.hang_up()  # edges that were agreed on for my old step are of no use
                self._adopt_(self._payload(state[1]).data.view(torch.float32))
                self.node.step = self.node.number = state[0]
                self.node.pending = None  # it was meant for other parameters
                break
        self.peers.settle(self.node.step, _snapshot(self.flat.read(), self._buffers()))

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
        """Parameters and floating-point buffers of every rank that can be reached, by rank.

        Whole models travel from neighbor to neighbor, off the account. All ranks must call it at the same step: one
        that does not is waited for as for a dead one.
        """
        self.land()
        mine = torch.cat((self.flat.read(), self._buffers()))
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
    def step(self) -> int:
        self.land()
        return self.node.step

    def state_dict(self) -> dict[str, Tensor]:
        """Copies, gamma and step. On resume, edges begin with whole parameters all the same."""
        self.land()
        return save_state(self.node, self.flat, self.said, self.world)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over this rank's own state, and join the group at its step, or at the group's if that is further."""
        self.land()
        check_state(state, self.node, self.flat, self.said, self.world)
        self.node.load(state)
        self.node.step = self.node.number = int(state["gradwire/step"])
        self.peers.hang_up()
        self._join()

    def report(self) -> GossipReport:
        """Bytes, distance, memory, gamma and losses so far."""
        self.land()
        rejoined = max(0, self.peers.joined - self._edges)
        losses = {"dropped": self.peers.dropped, "rejoined": rejoined, "drift": self.drift}
        return summarize(self.node, self.peers.traffic, self.world, **losses)

    def close(self) -> None:
        """Leave the group."""
        try:
            self.land()
        finally:
            self.peers.close()


def _snapshot(x: Tensor, buffers: Tensor) -> Snapshot:
    """Parameters and buffers, made into bytes only if somebody asks."""
    whole = torch.cat((x, buffers))
    return lambda: as_bytes(whole).cpu().numpy().tobytes()


def _pack(vectors: Mapping[int, Tensor]) -> bytes:
    """Rank by rank: a uint32, then the vector; all have the same length."""
    return b"".join(rank.to_bytes(4, "little") + as_bytes(x).cpu().numpy().tobytes() for rank, x in vectors.items())


def _unpack(body: bytes, like: Tensor) -> dict[int, Tensor]:
    size = 4 + 4 * like.numel()
    if len(body) % size:
        raise Malformed(f"a neighbor sent {len(body)} bytes of models, where each takes {size}; has it another model?")
    found = {}
    for at in range(0, len(body), size):
        data = torch.frombuffer(bytearray(body[at + 4 : at + size]), dtype=torch.float32)
        found[int.from_bytes(body[at : at + 4], "little")] = data.to(like.device)
    return found
