"""Delayed: apply last step's mean while this step's travels.

Paper:    Zheng et al., "Asynchronous stochastic gradient descent with delay compensation", ICML 2017, studies the
          delay; one step of it hides the network behind the next forward and backward pass
Formula:  update_t = mean_{t-1};  update_0 = 0
Wire:     as the exchange within
Traits:   not exact: one step stale; one more float per parameter
Differs:  no compensation of the delay
Spec:     delayed
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gradwire.codecs.codec import Codec
from gradwire.codecs.stage import StateSpec
from gradwire.core.registry import register
from gradwire.core.requests import CommGenerator
from gradwire.core.segments import Segments
from gradwire.exchanges.auto import Auto
from gradwire.exchanges.exchange import Aggregate, CommContext, Exchange, Message


@register("delayed", kind="exchange")
@dataclass(frozen=True)
class Delayed(Exchange):
    """Return the mean of the step before."""

    inner: Exchange = Auto()  # noqa: RUF009 - a frozen value
    examples: ClassVar[tuple[str, ...]] = ("delayed", "delayed(inner=two_way)")

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Exchange) or self.inner.compresses_in_protocol or isinstance(self.inner, Delayed):
            raise ValueError(f"delayed({self.inner}) cannot wrap that; it takes allreduce, allgather or two_way")

    delays: ClassVar[bool] = True

    @property
    def cuts(self) -> bool:  # type: ignore[override]
        return self.inner.cuts

    @property
    def serves(self) -> bool:  # type: ignore[override]
        return self.inner.serves

    @property
    def adds_payloads(self) -> bool:  # type: ignore[override]
        return self.inner.adds_payloads

    @property
    def check(self) -> Callable[[Codec], None] | None:  # type: ignore[override]
        return self.inner.check

    def slots(self, context: CommContext) -> dict[str, StateSpec]:
        own = {} if self.inner.slots is None else self.inner.slots(context)
        return {**own, "pending": StateSpec(context.tensors.lengths, "same")}

    def run(self, message: Message, codec: Codec, context: CommContext) -> CommGenerator[Aggregate]:
        aggregate = yield from self.inner.run(message, codec, context._replace(allow_sparse_result=False))
        assert isinstance(aggregate.mean, Tensor)
        last = aggregate.memory["pending"]
        return Aggregate(last, {**aggregate.memory, "pending": aggregate.mean})

    def traffic(self, codec: Codec, units: Segments, world: int) -> float:
        return self.inner.traffic(codec, units, world)
