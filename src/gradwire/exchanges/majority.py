"""Majority vote: each coordinate moves the way most workers point.

Paper:    Bernstein et al., "signSGD with majority vote is communication efficient and fault tolerant", ICLR 2019.
          https://arxiv.org/abs/1810.05291
Formula:  update = scale * sign(sum_r sign(x_r));  scale = mean over ranks of their scales
Wire:     N-1 payloads sent and received by each rank
Traits:   not exact; the sign quantizer only
Differs:  scaled by the mean of the workers' scales, so that the learning rate keeps its meaning; a tie moves nothing
Spec:     majority
"""

import torch

from gradwire.codecs import Codec
from gradwire.codecs.quantizers import Sign
from gradwire.core import CommGenerator, Gather, Payload, Segments, register
from gradwire.exchanges.exchange import Aggregate, CommContext, Exchange, Message
from gradwire.kernels.groups import over


@register("majority", kind="exchange")
class Majority(Exchange):
    """Vote on signs."""

    examples = ("majority",)

    def check(self, codec: Codec) -> None:
        if codec.selector or codec.transform or not isinstance(codec.quantizer, Sign):
            raise ValueError(f"majority counts signs of every entry, which {codec} does not send; use sign")

    def run(self, message: Message, codec: Codec, context: CommContext) -> CommGenerator[Aggregate]:
        assert isinstance(message.content, Payload)
        payloads = yield Gather(message.content, codec.size(context.units))
        votes = scale = torch.zeros((), device=message.content.data.device)
        for rank, payload in enumerate(payloads):
            decoded = codec.decode(payload, context.units, context.key.of(rank))
            votes, scale = votes + decoded.sign(), scale + decoded.abs()
        return Aggregate(over(votes.sign() * scale, context.world), message.memory)

    def traffic(self, codec: Codec, units: Segments, world: int) -> float:
        return (world - 1) * codec.size(units)
