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

import torch
from torch import Tensor

from gradwire.codecs import Codec, Memory, StateSpec
from gradwire.codecs import codec as as_codec
from gradwire.core import CommGenerator, register
from gradwire.gossip import auto_gamma
from gradwire.gossip.auto_gamma import Measurement
from gradwire.gossip.broadcast import BroadcastRules, NeighborMessages
from gradwire.gossip.gossip import MixResult, OutgoingMessage, decode_message, encode_message
from gradwire.gossip.message import GossipContext, Received, exchange_messages
from gradwire.gossip.requirements import require_consensus_step, require_contraction, require_doubly_stochastic
from gradwire.topology import Topology

AUTO = "auto"
_DENSE = as_codec("fp32")  # of the first message on a new edge


@register("choco", kind="gossip")
class Choco(BroadcastRules):
    """Compressed gossip with error feedback: what a message leaves out stays in the next difference.

    Attributes:
        gamma: The consensus step in (0, 1], or "auto".
    """

    gamma: float | str = AUTO
    examples = ("choco(ring)", "choco(torus, gamma=0.45)", "choco(one_peer_exponential)")
    elastic = True
    stacks_if_static = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gamma == AUTO or getattr(self.gamma, "name", None) == AUTO:  # a bare auto in a spec names an exchange
            object.__setattr__(self, "gamma", AUTO)
        else:
            require_consensus_step(self.gamma, "choco")

    def check(self, codec: Codec, topology: Topology) -> None:
        require_contraction(self, codec)
        require_doubly_stochastic(self, topology)

    def state_specs(self, context: GossipContext) -> dict[str, StateSpec]:
        like = StateSpec(context.tensors.lengths)
        if not _by_edge(context):
            return {"x_hat": like, "mixed": like}
        steps, topology = range(context.topology.period), context.topology
        out_peers = sorted({peer for step in steps for peer in topology.out_peers(context.rank, step)})
        in_peers = sorted({peer for step in steps for peer in topology.peers(context.rank, step)})
        return {f"to_{peer}": like for peer in out_peers} | {f"from_{peer}": like for peer in in_peers}

    def initial_memory(self, common: Tensor, codec: Codec, context: GossipContext) -> dict[str, Tensor]:
        memory = {name: common.clone() for name in self.state_specs(context)}
        if self.gamma == AUTO:
            memory["gauge"] = auto_gamma.initial_state(codec, context.units, context.topology)
        return memory

    def mix(self, x: Tensor, memory: Memory, codec: Codec, context: GossipContext) -> CommGenerator[MixResult]:
        return (yield from (self._mix_by_edge if _by_edge(context) else self._mix_by_node)(x, memory, codec, context))

    # -- one copy for all neighbors ------------------------------------------------------------------------------------

    def message(self, x: Tensor, memory: Memory, step: int) -> Tensor:
        del step
        return x - memory["x_hat"]

    def update(self, x: Tensor, memory: Memory, messages: NeighborMessages, step: int) -> MixResult:
        del step
        gamma = self._gamma(memory)
        x_hat, mixed = memory["x_hat"] + messages.own, messages.added_to(memory["mixed"])
        return MixResult(x + gamma * (mixed - x_hat), {**memory, "x_hat": x_hat, "mixed": mixed}, gamma)

    def measurement(self, x: Tensor, memory: Memory, messages: NeighborMessages) -> Measurement:
        """The vectors that show a step's lag and response, with the memory as it was before."""
        return Measurement(self.message(x, memory, 0), messages.own, memory["mixed"] - memory["x_hat"])

    def _mix_by_node(self, x: Tensor, memory: Memory, codec: Codec, context: GossipContext) -> CommGenerator[MixResult]:
        metadata = self._metadata(memory, context)
        result, messages, received = yield from self.broadcast(x, memory, codec, context, metadata)
        measurement = self.measurement(x, memory, messages)
        return result._replace(memory=self._adapt_gamma(result.memory, measurement, received, codec, context))

    # -- a copy for each edge ------------------------------------------------------------------------------------------

    def _mix_by_edge(self, x: Tensor, memory: Memory, codec: Codec, context: GossipContext) -> CommGenerator[MixResult]:
        new = {peer for peer, is_new in (context.live or {}).items() if is_new}
        codecs = {peer: _DENSE if peer in new else codec for peer in {*context.in_weights, *context.out_weights}}
        differences = {peer: x if peer in new else x - memory[f"to_{peer}"] for peer in context.out_weights}
        sent = {peer: encode_message(d, codecs[peer], context, peer) for peer, d in differences.items()}
        varies = not codec.traits.fixed
        received = yield from exchange_messages(
            context,
            {peer: message.payload for peer, message in sent.items()},
            {peer: None if varies else codecs[peer].fixed_size(context.units) for peer in context.in_weights},
            self._metadata(memory, context),
        )
        copies = {f"to_{peer}": (peer, message.decoded) for peer, message in sent.items()}
        for peer, message in received.items():
            copies[f"from_{peer}"] = peer, decode_message(message, codecs[peer], context, peer, context.rank)
        gamma = self._gamma(memory)
        measurement = _measure(differences, sent, memory, new, context) if self.gamma == AUTO else None
        memory = {**memory, **{n: q if peer in new else memory[n] + q for n, (peer, q) in copies.items()}}
        memory = self._adapt_gamma(memory, measurement, received, codec, context)
        if context.elastic:
            result = self._mix_live(x, memory, gamma, received, new, context)
            return result._replace(memory=_average_copies(result.memory, new & received.keys()))
        return MixResult(_mix_all(x, memory, gamma, context), memory, gamma)

    def _mix_live(
        self, x: Tensor, memory: Memory, gamma: float, received: Received, new: Collection[int], context: GossipContext
    ) -> MixResult:
        """Mix with the peers that are there. A lost peer's weight returns to its owner: nothing flows over its edge.

        On a new edge, parameters are sent whole, so they are mixed with gamma 1.
        """
        flows = {}
        for peer, weight in context.in_weights.items():
            if peer in received:
                # Ranks that come and go share no window, but each edge may agree: what one end gains, the other loses.
                step = min(gamma, *received[peer].metadata) if self.gamma == AUTO else gamma
                if peer in new and context.key.step:  # at step 0 all ranks begin alike, as without elastic=True
                    step = 1.0
                flow = step * weight * (memory[f"from_{peer}"] - memory[f"to_{peer}"])
                x, flows[peer] = x + flow, flow.norm()
        return MixResult(x, memory, gamma, flows)

    # -- the consensus step --------------------------------------------------------------------------------------------

    def _gamma(self, memory: Memory) -> float:
        return auto_gamma.gamma(memory["gauge"]) if self.gamma == AUTO else float(self.gamma)

    def _metadata(self, memory: Memory, context: GossipContext) -> tuple[float, ...]:
        if self.gamma != AUTO:
            return ()
        return (self._gamma(memory),) if context.elastic else auto_gamma.metadata(memory["gauge"])

    def _adapt_gamma(
        self, memory: Memory, measurement: Measurement | None, received: Received, codec: Codec, context: GossipContext
    ) -> Memory:
        if self.gamma != AUTO:
            return memory
        theirs = [] if context.elastic else [(w, received[peer].metadata) for peer, w in context.in_weights.items()]
        state = auto_gamma.after_step(memory["gauge"], measurement, theirs, context.key.step, context.topology, codec)
        return {**memory, "gauge": state}


def _by_edge(context: GossipContext) -> bool:
    return context.elastic or context.topology.period > 1


def _mix_all(x: Tensor, memory: Memory, gamma: float, context: GossipContext) -> Tensor:
    """What flows in over each edge, less what flows out."""
    for peer, weight in context.in_weights.items():
        x = x + gamma * weight * memory[f"from_{peer}"]
    for peer, weight in context.out_weights.items():
        x = x - gamma * weight * memory[f"to_{peer}"]
    return x


def _average_copies(memory: Memory, new: Collection[int]) -> Memory:
    """Both copies of a new edge continue from their mean.

    Left as they are, they would push until the codec has sent the whole difference: where few entries differ by much,
    as after a long absence, sign needs hundreds of steps, and replicas overshoot each other by far.
    """
    means = {peer: (memory[f"to_{peer}"] + memory[f"from_{peer}"]) / 2 for peer in new}
    return {**memory, **{f"{way}_{peer}": x.clone() for peer, x in means.items() for way in ("to", "from")}}


def _measure(
    differences: Mapping[int, Tensor],
    sent: Mapping[int, OutgoingMessage],
    memory: Memory,
    new: Collection[int],
    context: GossipContext,
) -> Measurement | None:
    """The mean over the edges of this step, new ones left out; None where there is none."""
    out_weights = {peer: weight for peer, weight in context.out_weights.items() if peer not in new}
    if not out_weights:
        return None
    in_weights = {peer: weight for peer, weight in context.in_weights.items() if peer not in new}
    # A difference of equal copies, as those of an edge that was new, is 0: its rounding would look like an endless lag.
    both = {peer for peer, weight in in_weights.items() if out_weights.get(peer) == weight}
    flows = [in_weights[peer] * (memory[f"from_{peer}"] - memory[f"to_{peer}"]) for peer in sorted(both)]
    flows += [weight * memory[f"from_{peer}"] for peer, weight in in_weights.items() if peer not in both]
    flows += [-weight * memory[f"to_{peer}"] for peer, weight in out_weights.items() if peer not in both]
    d = torch.stack([differences[peer] for peer in out_weights]).mean(0)
    q = torch.stack([sent[peer].decoded for peer in out_weights]).mean(0)
    return Measurement(d, q, torch.stack(flows).sum(0))
