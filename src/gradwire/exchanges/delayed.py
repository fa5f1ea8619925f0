"""Delayed: apply last step's mean while this step's travels.

Paper:    Zheng et al., "Asynchronous stochastic gradient descent with delay compensation", ICML 2017, studies the
          delay; one step of it hides the network behind the next forward and backward pass
Formula:  update_t = mean_{t-1};  update_0 = 0
Wire:     as the exchange within
Traits:   not exact: one step stale; one more float per parameter
Differs:  no compensation of the delay
Spec:     delayed
"""

from torch import Tensor

from gradwire.codecs import Codec, StateSpec
from gradwire.core import CommGenerator, Segments, register
from gradwire.exchanges.auto import Auto
from gradwire.exchanges.exchange import Aggregate, CommContext, Exchange, Message


@register("delayed", kind="exchange")
class Delayed(Exchange):
    """Return the mean of the step before."""

    inner: Exchange = Auto()
    examples = ("delayed", "delayed(inner=two_way)")
    delays = True

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Exchange) or self.inner.compresses_in_protocol or isinstance(self.inner, Delayed):
            raise ValueError(f"delayed({self.inner}) cannot wrap that; it takes allreduce, allgather or two_way")
        for name in ("sends_slices", "keeps_server_error", "adds_payloads", "check"):  # those of the exchange within
            object.__setattr__(self, name, getattr(self.inner, name))

    def state_specs(self, context: CommContext) -> dict[str, StateSpec]:
        own = {} if self.inner.state_specs is None else self.inner.state_specs(context)
        return {**own, "pending": StateSpec(context.tensors.lengths, "same")}

    def run(self, message: Message, codec: Codec, context: CommContext) -> CommGenerator[Aggregate]:
        context = context._replace(allow_sparse_result=False, out=None, scattered=None)
        aggregate = yield from self.inner.run(message, codec, context)
        assert isinstance(aggregate.mean, Tensor)
        last = aggregate.memory["pending"]
        return Aggregate(last, {**aggregate.memory, "pending": aggregate.mean})

    def traffic(self, codec: Codec, units: Segments, world: int) -> float:
        return self.inner.traffic(codec, units, world)
