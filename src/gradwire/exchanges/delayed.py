"""Delayed: apply last step's mean while this step's travels.

Paper:    Zheng et al., "Asynchronous stochastic gradient descent with delay compensation", ICML 2017, studies the
          delay; one step of it hides the network behind the next forward and backward pass
Formula:  update_t = mean_{t-1};  update_0 = 0
Wire:     as the exchange within
Traits:   not exact: one step stale; one more float per parameter
Differs:  no compensation of the delay
Spec:     delayed
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gradwire.codecs.codec import Codec
from gradwire.codecs.stage import EncodeInput, StateSpec
from gradwire.core.registry import register
from gradwire.core.requests import CommGenerator
from gradwire.core.segments import Segments
from gradwire.exchanges.auto import Auto
from gradwire.exchanges.exchange import Aggregate, CommContext, EncodeShard, Exchange, Message


@register("delayed", kind="exchange")
@dataclass(frozen=True)
class Delayed(Exchange):
    """Hand back what the group agreed on one step ago."""

    inner: Exchange = Auto()  # noqa: RUF009 - a frozen value
    examples: ClassVar[tuple[str, ...]] = ("delayed", "delayed(inner=two_way)")

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Exchange) or self.inner.late or isinstance(self.inner, Delayed):
            raise ValueError(f"delayed({self.inner}) cannot wrap that; it takes allreduce, allgather or two_way")

    delays: ClassVar[bool] = True

    @property
    def cuts(self) -> bool:  # type: ignore[override]
        return self.inner.cuts

    @property
    def serves(self) -> bool:  # type: ignore[override]
        return self.inner.serves

    def check(self, codec: Codec) -> None:
        self.inner.check(codec)

    def slots(self, around: CommContext) -> dict[str, StateSpec]:
        pending = StateSpec(around.tensors.lengths, "same")
        return {**self.inner.slots(around), "pending": pending}

    def encode(self, signal: EncodeInput, codec: Codec, around: CommContext) -> Message:
        return self.inner.encode(signal, codec, around)

    def collect(self, say: EncodeShard, around: CommContext) -> Message:
        return self.inner.collect(say, around)

    def talk(self, said: Message, codec: Codec, around: CommContext) -> CommGenerator[Aggregate]:
        agreed = yield from self.inner.talk(said, codec, around._replace(apart=False))
        assert isinstance(agreed.mean, Tensor)  # it is kept, so nobody else is to write it
        last = agreed.memory["pending"]
        return Aggregate(last, {**agreed.memory, "pending": agreed.mean})

    def traffic(self, codec: Codec, units: Segments, world: int) -> float:
        return self.inner.traffic(codec, units, world)
