"""All-reduce: add payloads on the way.

Paper:    Patarasuk, Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009
Formula:  mean = decode(sum over ranks of encode(x_r)) / N
Wire:     2 (N-1)/N payloads sent by each rank, whatever N
Traits:   exact, but for the rounding of sums in the payload's format; linear codecs only
Differs:  summands are limited to 1/N of their format's range, less what sums may gain by rounding, so that the sum
          stays finite; the excess is an error. No feedback remembers how sums are rounded: in fp16 they lose 1.5e-4
          of a constant gradient on 2 ranks and 3.5e-4 on 8, in bf16 1.2e-3 and 2.7e-3; two_way sends as much, and
          remembers
Spec:     allreduce
"""

from functools import reduce

import torch

from gradwire.codecs import Codec, Decoded, Memory
from gradwire.codecs.addends import as_addend, dtype_of
from gradwire.core import CommGenerator, Payload, Request, Segments, Sum, register
from gradwire.exchanges.batch import META, RankBatch, Simulated
from gradwire.exchanges.exchange import Aggregate, CommContext, Exchange, Message
from gradwire.kernels.groups import over, over_
from gradwire.kernels.quantize import cast_decode


@register("allreduce", kind="exchange")
class AllReduce(Exchange):
    """Sum linear payloads."""

    examples = ("allreduce",)
    exact = True
    adds_payloads = True

    def auto_may_choose(self, codec: Codec) -> bool:
        return codec.traits.linear

    def check(self, codec: Codec) -> None:
        if not codec.traits.linear:
            raise ValueError(
                f"allreduce adds payloads, but a sum of payloads of {codec} means nothing; "
                "use exchange='allgather', 'two_way' or 'auto'"
            )

    def run(self, message: Message, codec: Codec, context: CommContext) -> CommGenerator[Aggregate]:
        assert isinstance(message.content, Payload)
        total = yield Sum(as_addend(codec, message.content))
        mean = over_(cast_decode(total), context.world)
        return Aggregate(codec.decoder.expand(mean, context.units, context.key), message.memory)

    def simulate(self, sent: Decoded, memory: Memory, codec: Codec, batch: RankBatch) -> Simulated:
        rows = sent.values.to(dtype_of(codec)).view(batch.world, -1)
        total = reduce(torch.add, rows[1:], rows[0].clone()).float()
        mean = codec.decoder.expand(over(total, batch.world), batch.units, batch.key.of(0))
        addend: Request = Sum(torch.empty_like(rows[0], device=META))
        return mean, memory, [[addend] * batch.world]

    def traffic(self, codec: Codec, units: Segments, world: int) -> float:
        return 2 * (world - 1) / world * codec.size(units)
