"""CHOCO-SGD: gossip over public copies of the models, to which only compressed differences are sent.

Paper:    Koloskova, Stich, Jaggi, "Decentralized stochastic optimization and gossip algorithms with compressed
          communication", ICML 2019. https://arxiv.org/abs/1902.00340
          Koloskova et al., "Decentralized deep learning with arbitrary communication compression", ICLR 2020.
          https://arxiv.org/abs/1907.09356
Formula:  q_i = C(x_i - xhat_i);  xhat_i = xhat_i + q_i;  s_i = s_i + sum_j w_ij q_j;  x_i = x_i + gamma (s_i - xhat_i)
          edges:  q_ik = C(x_i - xhat_ik);  xhat_ik = xhat_ik + q_ik, at both ends;
                  x_i = x_i + gamma (sum_j w_ij xhat_ji - sum_k w_ki xhat_ik)
Wire:     one message of the codec to each neighbor
Traits:   contractions without memory; doubly stochastic graphs. On a static graph two more vectors, xhat and s,
          whatever the degree; where it changes, or with elastic=True, two for each neighbor. Keeps the mean over ranks
Differs:  xhat starts at the parameters that all ranks start from, not at zero; gamma='auto' is found while training;
          copies by edge are an addition: a new edge begins with whole parameters, which are mixed with gamma 1, and its
          copies with their middle
Spec:     choco(ring), choco(ring, gamma=0.45), choco(torus, gamma='auto')
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.codecs.codec import Codec, codec
from gradwire.codecs.stage import Memory, StateSpec
from gradwire.core.registry import register
from gradwire.core.requests import CommGenerator
from gradwire.gossip import auto_gamma
from gradwire.gossip.broadcast import BroadcastMethod, Heard
from gradwire.gossip.gossip import (
    GossipContext,
    MixResult,
    Speech,
    hear,
    need_contraction,
    need_doubly,
    need_step,
    say,
    size_of,
)
from gradwire.gossip.message import GossipMessage, post
from gradwire.topology import Graph, Topology

AUTO = "auto"


@register("choco", kind="gossip")
@dataclass(frozen=True)
class Choco(BroadcastMethod):
    """Compressed gossip that forgets nothing: what a message leaves out stays in the next difference.

    Attributes:
        graph: Who talks to whom.
        gamma: The consensus step in (0, 1], or "auto".
    """

    graph: Graph
    gamma: float | str = AUTO
    examples: ClassVar[tuple[str, ...]] = ("choco(ring)", "choco(torus, gamma=0.45)", "choco(one_peer_exponential)")
    elastic: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gamma == AUTO or getattr(self.gamma, "name", None) == AUTO:  # a bare auto in a spec names an exchange
            object.__setattr__(self, "gamma", AUTO)
        else:
            need_step(self.gamma, "choco")

    def check(self, codec: Codec, topology: Topology) -> None:
        need_contraction(self, codec)
        need_doubly(self, topology)

    def slots(self, around: GossipContext) -> dict[str, StateSpec]:
        like = StateSpec(around.tensors.lengths)
        if not _by_edge(around):
            return {"x_hat": like, "mixed": like}
        tells, hears = _edges(around)
        return {f"to_{peer}": like for peer in tells} | {f"from_{peer}": like for peer in hears}

    def begin(self, common: Tensor, codec: Codec, around: GossipContext) -> dict[str, Tensor]:
        memory = {name: common.clone() for name in self.slots(around)}
        if self.gamma == AUTO:
            memory["gauge"] = auto_gamma.begin(codec, around.units, around.topology)
        return memory

    def stacks(self, topology: Topology) -> bool:
        return topology.period == 1

    def words(self, x: Tensor, memory: Memory, step: int) -> Tensor:
        del step
        return x - memory["x_hat"]

    def learn(self, x: Tensor, memory: Memory, heard: Heard, step: int) -> MixResult:
        del step
        gamma = self._gamma(memory)
        x_hat, mixed = memory["x_hat"] + heard.mine, heard.onto(memory["mixed"])
        return MixResult(x + gamma * (mixed - x_hat), {**memory, "x_hat": x_hat, "mixed": mixed}, gamma)

    def seen(self, x: Tensor, memory: Memory, heard: Heard) -> auto_gamma.Seen:
        """What a step shows of lag and response, with the memory as it was before."""
        return auto_gamma.Seen(self.words(x, memory, 0), heard.mine, memory["mixed"] - memory["x_hat"])

    def talk(self, x: Tensor, memory: Memory, codec: Codec, around: GossipContext) -> CommGenerator[MixResult]:
        return (yield from (self._by_edge if _by_edge(around) else self._by_node)(x, memory, codec, around))

    def _by_node(self, x: Tensor, memory: Memory, codec: Codec, around: GossipContext) -> CommGenerator[MixResult]:
        met, heard, letters = yield from self.exchange(x, memory, codec, around, self._note(memory, around))
        learned = self._learn(met.memory, self.seen(x, memory, heard), letters, codec, around)
        return met._replace(memory=learned)

    def _by_edge(self, x: Tensor, memory: Memory, codec: Codec, around: GossipContext) -> CommGenerator[MixResult]:
        fresh = {peer for peer, new in (around.live or {}).items() if new}
        codecs = {peer: _WHOLE if peer in fresh else codec for peer in {*around.hears, *around.tells}}
        differences = {peer: x if peer in fresh else x - memory[f"to_{peer}"] for peer in around.tells}
        told = {peer: say(d, codecs[peer], around, peer) for peer, d in differences.items()}
        varies = size_of(codec, around) is None
        letters = yield from post(
            around.stamp(),
            {peer: speech.payload for peer, speech in told.items()},
            {peer: None if varies else size_of(codecs[peer], around) for peer in around.hears},
            self._note(memory, around),
        )
        heard = {peer: hear(letter, codecs[peer], around, peer, around.me) for peer, letter in letters.items()}
        copies = {f"to_{peer}": (peer, speech.heard) for peer, speech in told.items()}
        copies |= {f"from_{peer}": (peer, q) for peer, q in heard.items()}
        gamma = self._gamma(memory)
        seen = _seen(differences, told, memory, fresh, around) if self.gamma == AUTO else None
        memory = {**memory, **{n: q if peer in fresh else memory[n] + q for n, (peer, q) in copies.items()}}
        memory = self._learn(memory, seen, letters, codec, around)
        if around.elastic:
            met = self._mix_live(x, memory, gamma, letters, fresh, around)
            return met._replace(memory=_even(met.memory, fresh & letters.keys()))
        return MixResult(_mix(x, memory, gamma, around), memory, gamma)

    def _mix_live(
        self,
        x: Tensor,
        memory: Memory,
        gamma: float,
        letters: Mapping[int, GossipMessage],
        fresh: Collection[int],
        around: GossipContext,
    ) -> MixResult:
        """A lost peer's weight returns to its owner: nothing flows over its edge. What is told whole flows whole."""
        flows = {}
        for peer, weight in around.hears.items():
            if peer in letters:
                # Ranks that come and go share no window, but each edge may agree: what one end gains, the other loses.
                step = min(gamma, *letters[peer].note) if self.gamma == AUTO else gamma
                if peer in fresh and around.key.step:  # at the very first step all begin alike, as without elastic=True
                    step = 1.0
                flow = step * weight * (memory[f"from_{peer}"] - memory[f"to_{peer}"])
                x, flows[peer] = x + flow, flow.norm()
        return MixResult(x, memory, gamma, flows)

    def _gamma(self, memory: Memory) -> float:
        return auto_gamma.gamma(memory["gauge"]) if self.gamma == AUTO else float(self.gamma)

    def _note(self, memory: Memory, around: GossipContext) -> tuple[float, ...]:
        if self.gamma != AUTO:
            return ()
        return (self._gamma(memory),) if around.elastic else auto_gamma.note(memory["gauge"])

    def _learn(
        self,
        memory: Memory,
        seen: auto_gamma.Seen | None,
        letters: Mapping[int, GossipMessage],
        codec: Codec,
        around: GossipContext,
    ) -> Memory:
        if self.gamma != AUTO:
            return memory
        heard = [] if around.elastic else [(weight, letters[peer].note) for peer, weight in around.hears.items()]
        state = auto_gamma.turn(memory["gauge"], seen, heard, around.key.step, around.topology, codec)
        return {**memory, "gauge": state}


def _mix(x: Tensor, memory: Memory, gamma: float, around: GossipContext) -> Tensor:
    """What flows in over each edge, less what flows out."""
    for peer, weight in around.hears.items():
        x = x + gamma * weight * memory[f"from_{peer}"]
    for peer, weight in around.tells.items():
        x = x - gamma * weight * memory[f"to_{peer}"]
    return x


_WHOLE = codec("fp32")  # what an edge begins with, when one of its ends comes back


def _even(memory: Memory, fresh: Collection[int]) -> Memory:
    """Both copies of a new edge go on from the middle of what its ends have told each other.

    Left apart, they would push for as long as a codec takes to tell that the ends have met: where few entries differ by
    much, as after a long absence, sign needs hundreds of steps, and replicas are thrown far beyond each other.
    """
    middles = {peer: (memory[f"to_{peer}"] + memory[f"from_{peer}"]) / 2 for peer in fresh}
    return {**memory, **{f"{way}_{peer}": x.clone() for peer, x in middles.items() for way in ("to", "from")}}


def _seen(
    differences: Mapping[int, Tensor],
    told: Mapping[int, Speech],
    memory: Memory,
    fresh: Collection[int],
    around: GossipContext,
) -> auto_gamma.Seen | None:
    """The mean over the edges of this step, new ones left out; None where there is none."""
    tells = {peer: weight for peer, weight in around.tells.items() if peer not in fresh}
    if not tells:
        return None
    flows = [weight * memory[f"from_{peer}"] for peer, weight in around.hears.items() if peer not in fresh]
    flows += [-weight * memory[f"to_{peer}"] for peer, weight in tells.items()]
    d = torch.stack([differences[peer] for peer in tells]).mean(0)
    q = torch.stack([told[peer].heard for peer in tells]).mean(0)
    return auto_gamma.Seen(d, q, torch.stack(flows).sum(0))


def _by_edge(around: GossipContext) -> bool:
    return around.elastic or around.topology.period > 1


def _edges(around: GossipContext) -> tuple[list[int], list[int]]:
    """All peers that ever hear me, and all that I ever hear."""
    steps = range(around.topology.period)
    tells = {peer for step in steps for peer in around.topology.out_peers(around.me, step)}
    hears = {peer for step in steps for peer in around.topology.peers(around.me, step)}
    return sorted(tells), sorted(hears)
