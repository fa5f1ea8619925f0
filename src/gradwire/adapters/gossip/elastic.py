"""Elastic net: gossip that goes on when neighbors die or stall, and takes them back."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.adapters.gossip.checkpoint import check_state, save_state
from gradwire.adapters.gossip.replica import CodecSpec, Flat, describe, make_node
from gradwire.adapters.gossip.report import GossipReport, summarize
from gradwire.core.asks import Swap, Talk
from gradwire.core.payload import Payload, as_bytes
from gradwire.gossip import Gossip
from gradwire.links.meeting import meeting as as_meeting
from gradwire.links.peers import Peers, Snapshot

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
        """Average with the neighbors that are there."""
        if self.peers.left_behind(self.node.step, slack=self.world):
            self._join()
        step = self.node.step
        live = self.peers.begin(step)
        before = float(self.node.moved)
        met = self._talk(self.node.run(self.flat.read(), live), step)
        if self.peers.dropped > self._noted:
            self.drift += before / self.world
            self._noted = self.peers.dropped
        self.flat.write_(met)
        self.peers.done(step, self._snapshot(met))

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
                break
        self.peers.settle(self.node.step, self._snapshot(self.flat.read()))

    def _adopt_(self, whole: Tensor) -> None:
        buffers = list(self.flat.buffers.values())
        x, *parts = whole.split([self.flat.tensors.total, *(buffer.numel() for buffer in buffers)])
        self.flat.write_(x)
        with torch.no_grad():
            for buffer, part in zip(buffers, parts, strict=True):
                buffer.copy_(part.view(buffer.shape))

    def _snapshot(self, x: Tensor) -> Snapshot:
        """Parameters and floating-point buffers, made into bytes only if somebody asks."""
        whole = torch.cat([x, *(buffer.detach().flatten().to(x) for buffer in self.flat.buffers.values())])
        return lambda: as_bytes(whole).cpu().numpy().tobytes()

    @property
    def step(self) -> int:
        return self.node.step

    def state_dict(self) -> dict[str, Tensor]:
        """Copies, gamma and step. On resume, edges begin with whole parameters all the same."""
        return save_state(self.node, self.flat, self.said, self.world)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over this rank's own state, and join the group at its step, or at the group's if that is further."""
        check_state(state, self.node, self.flat, self.said, self.world)
        self.node.load(state)
        self.node.step = self.node.number = int(state["gradwire/step"])
        self.peers.hang_up()
        self._join()

    def report(self) -> GossipReport:
        """Bytes, distance, memory, gamma and losses so far."""
        rejoined = max(0, self.peers.joined - self._edges)
        losses = {"dropped": self.peers.dropped, "rejoined": rejoined, "drift": self.drift}
        return summarize(self.node, self.peers.traffic, self.world, **losses)

    def close(self) -> None:
        """Leave the group."""
        self.peers.close()
