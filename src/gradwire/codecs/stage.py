"""The four kinds of stage, and what passes between them.

Every stage is a frozen dataclass. It works on a whole flat buffer at once: ``segments`` (before selection) or
``lengths`` (how many values each segment has left) tell which stretch belongs to which unit.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from torch import Tensor

from gradwire.core import Key, Named, Segments, Traits
from gradwire.core.layout import Flat
from gradwire.core.renamed import renamed_attributes
from gradwire.kernels.rice import Found

if TYPE_CHECKING:
    from gradwire.codecs.codec import Codec

Memory = Mapping[str, Tensor]
# (gradient, residual, decay, lengths, before) -> (data, not finite): keeps the error as it encodes.
FeedbackKernel = Callable[..., tuple[Tensor, Tensor]]
# (gradient, residual, momentum, decay, lengths, before, out) -> the same, where the gradient enters momentum first. The
# gradient may lie in pieces.
MomentumKernel = Callable[..., tuple[Tensor, Tensor]]
# (messages uint8[ranks, size], error, lengths) -> the mean of messages plus the error, encoded; and the new error.
MergeKernel = Callable[[Tensor, Tensor | None, tuple[int, ...]], tuple[Tensor, Tensor | None]]


class EncodeInput(NamedTuple):
    """All that an encoder may look at.

    Attributes:
        grad: Today's gradient, flat float32.
        target: What should be sent: the gradient plus what the feedback added.
        memory: The lane's named flat buffers.
        segments: The units of the flat buffer.
    """

    grad: Tensor
    target: Tensor
    memory: Memory
    segments: Segments

    def cut(self, start: int, stop: int) -> "EncodeInput":
        """The part of it in ``[start, stop)``; the memory stays whole."""
        if (start, stop) == (0, self.segments.total):
            return self
        window = self.segments.window(start, stop)
        return EncodeInput(self.grad[start:stop], self.target[start:stop], self.memory, window)


class Decoded(NamedTuple):
    """What receivers decode of a message.

    Attributes:
        indices: Rising flat positions that a selector chose; None when every position was sent.
        values: The values as decoded, one per position.
    """

    indices: Tensor | None
    values: Tensor

    def residual_of(self, target: Tensor) -> Tensor:
        """``target - sent``: rounding errors, and all that was not selected."""
        if self.indices is None:
            return target - self.values
        return target.index_add(0, self.indices, self.values, alpha=-1)

    def add_to(self, x: Tensor) -> Tensor:
        """``x + sent``."""
        if self.indices is None:
            return x + self.values
        return x.index_add(0, self.indices, self.values)


class Stage(Named):
    """A named, frozen piece of a codec.

    An attribute that may be None is an optional capability. A stage that has it defines a method of that name.
    """

    def __or__(self, other: "Stage | Codec") -> "Codec":
        from gradwire.codecs.codec import join  # a codec is made of stages: the import must wait

        return join(self, other)


class Transform(Stage):
    """A change of basis, drawn from bits that all ranks share."""

    @abstractmethod
    def widen(self, segments: Segments) -> Segments:
        """The segment table after `forward`."""

    @abstractmethod
    def forward(self, x: Tensor, segments: Segments, key: Key) -> Tensor:
        """Into the new basis. [segments.total] -> [widen(segments).total]."""

    @abstractmethod
    def inverse(self, y: Tensor, segments: Segments, key: Key) -> Tensor:
        """Back again; ``segments`` is the table before `forward`."""


@renamed_attributes({"absorb": "memory_with_gradient", "remember": "memory_after_sending"})
class Selector(Stage):
    """Chooses which positions are sent."""

    receivers_redraw: bool = False  # receivers can redraw the choice from the sender's key, so no indices travel
    exact_topk: ClassVar[bool] = False  # `select` is exact top-k, which fused kernels know
    memories: tuple[str, ...] = ()  # elementwise buffers of its own
    # What sent values of a segment of n elements are multiplied by, to undo a bias.
    gain: Callable[[int], float] | None = None
    # The lane's memory with today's gradient, or with the second moments that the loop observed instead.
    memory_with_gradient: Callable[[Tensor, Memory, Tensor | None], Memory] | None = None
    # The lane's memory after these positions were sent.
    memory_after_sending: Callable[[EncodeInput, Tensor], Memory] | None = None

    @abstractmethod
    def capacity(self, n: int) -> int:
        """The most entries a segment of ``n`` elements may send."""

    @abstractmethod
    def select(self, signal: EncodeInput, key: Key) -> Tensor:
        """Rising flat int64 positions, exactly ``capacity`` in each segment, or at most so many where not `fixed`."""

    @property
    @abstractmethod
    def traits(self) -> Traits: ...


class Quantizer(Stage):
    """Turns values into bytes. A scale belongs to one segment, or to one block of it."""

    fuses: bool = True  # whether the next four serve it with the arguments that it has
    feedback_kernel: FeedbackKernel | None = None
    momentum_kernel: MomentumKernel | None = None
    merge: MergeKernel | None = None
    # (messages, error, lengths, out) -> the message that `merge` gives; the new error is written to ``out``.
    merge_into: Callable[[Tensor, Tensor, tuple[int, ...], Tensor], Tensor] | None = None
    # (data, lengths) -> whether a value that is not finite was encoded, a bool on the device, as the message tells.
    has_nonfinite: Callable[[Tensor, tuple[int, ...]], Tensor] | None = None
    # (data, lengths, out) -> what `decode` gives, written to ``out``.
    decode_into: Callable[[Tensor, Tensor, Any], Any] | None = None
    # Whether `decode_into`, `decode_times`, and `feedback_kernel` or, with `has_nonfinite`, `encode`, take a vector in
    # several places. Subclasses do not inherit it.
    takes_scattered: ClassVar[bool] = False
    # (data, lengths, out, factor, product) -> what `decode` gives is written to ``out``, times factor to ``product``.
    decode_times: Callable[[Tensor, Tensor, Tensor, Tensor, Flat], None] | None = None

    @abstractmethod
    def size(self, lengths: tuple[int, ...]) -> int:
        """Exact bytes for segments with that many values each."""

    @abstractmethod
    def encode(self, values: Tensor, lengths: Tensor, names: tuple[str, ...], key: Key) -> Tensor:
        """float32[m] -> uint8[size]. ``lengths`` (int64) sums to m; ``names`` name the random streams."""

    @abstractmethod
    def decode(self, data: Tensor, lengths: Tensor, names: tuple[str, ...], key: Key) -> Tensor:
        """uint8[size] -> float32[m]: the values as all ranks decode them, the sender included."""

    @property
    @abstractmethod
    def traits(self) -> Traits: ...


class IndexCoder(Stage):
    """Turns rising flat positions into bytes. Their number travels with them where receivers do not have it."""

    fixed: bool = True  # the number of bytes depends on count and n alone
    # The same coder with all that it may know of a segment table; others know its length alone.
    bind: Callable[[Segments], "IndexCoder"] | None = None
    # (positions, n) -> how many bytes `encode` makes, on the device.
    measure: Callable[[Tensor, int], Tensor] | None = None
    # (rows, count, n) -> the positions of several messages at once, without reading the device; None: not there.
    decode_rows: Callable[[Tensor, int, int], Found | None] | None = None
    # (positions, n, key) -> those that fit into `size`; nearly always all of them.
    drop_overflow: Callable[[Tensor, int, Key], Tensor] | None = None
    # Runs what a small message makes no use of, so that it is compiled before a large one does.
    warm_up: Callable[[], None] | None = None

    @abstractmethod
    def size(self, count: int, n: int) -> int:
        """The most bytes that ``count`` positions below ``n`` may take; exact when `fixed`."""

    @abstractmethod
    def encode(self, indices: Tensor, n: int) -> Tensor:
        """int64[count], rising, below n -> uint8."""

    @abstractmethod
    def decode(self, data: Tensor, count: int, n: int) -> tuple[Tensor, int]:
        """The positions, and how many bytes of ``data`` they took. Positions are *not* trusted: the codec checks."""


@dataclass(frozen=True)
class StateSpec:
    """A named memory, as lanes allocate, save and reshard it.

    Attributes:
        lengths: Elements per tensor of the lane, in lane order.
        reshard: What a new world makes of the old ranks' copies. ``mean``: every rank takes their mean (of errors, the
            mean is the pending update). ``same``: all ranks hold the same. ``shard``: each rank holds its own stretch
            of one whole vector.
    """

    lengths: tuple[int, ...]
    reshard: str = "mean"
