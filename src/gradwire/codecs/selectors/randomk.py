"""Random-k: keep k entries drawn uniformly without replacement.

Paper:    Stich, Cordonnier and Jaggi, "Sparsified SGD with memory", NeurIPS 2018.
          https://arxiv.org/abs/1809.07599
Formula:  C(x)_i = c * x_i if i is among k random positions of its segment, else 0;
          k = max(1, round(ratio * n));  c = n/k if unbiased, else 1
Wire:     indices  none: receivers redraw them from the sender's key
          values   k per segment, as the quantizer packs them
Traits:   contraction unless unbiased, E|x - C(x)|^2 = (1 - k/n) |x|^2; linear if shared;
          unbiased if asked; fixed
Differs:  the paper lets each worker draw for itself, as shared=False does here; by default all
          workers draw alike, so that their messages can be added.
Spec:     randomk(0.01), randomk(0.01, shared=False), randomk(0.01, unbiased=True)
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.codecs.stage import EncodeInput, Selector
from gradwire.core.arguments import is_fraction
from gradwire.core.decode_cache import memoized
from gradwire.core.keys import Key
from gradwire.core.registry import register
from gradwire.core.segments import Segments
from gradwire.core.traits import Traits
from gradwire.kernels.select import draw_places, share


@register("randomk", kind="selector")
@dataclass(frozen=True)
class RandomK(Selector):
    """Random entries of each segment; of a signal, only the segments and the device are read.

    Attributes:
        ratio: The share of a segment's entries that is sent, in (0, 1].
        shared: Whether all ranks draw the same positions.
        unbiased: Whether sent values are scaled by n/k.
    """

    ratio: float
    shared: bool = True
    unbiased: bool = False

    receivers_redraw = True
    examples: ClassVar[tuple[str, ...]] = (
        "randomk(0.01)",
        "randomk(0.3, shared=False)",
        "randomk(0.3, unbiased=True)",
    )

    def __post_init__(self) -> None:
        if not is_fraction(self.ratio):
            raise ValueError(
                f"randomk({self.ratio!r}) keeps a share of the entries, which must be in (0, 1]; "
                "write randomk(0.01) for one percent"
            )
        for name, value in (("shared", self.shared), ("unbiased", self.unbiased)):
            if not isinstance(value, bool):
                raise ValueError(f"randomk got {name}={value!r}; write {name}=True or {name}=False")

    def capacity(self, n: int) -> int:
        return share(self.ratio, n)

    def select(self, signal: EncodeInput, key: Key) -> Tensor:
        table, device = signal.segments, signal.target.device
        stream = (key.shared() if self.shared else key).fold("randomk")
        # Receivers redraw what the sender drew: among ranks of one process, once is enough.
        return memoized((), (self.ratio, table, stream, device), lambda: self._drawn(table, stream, device))

    def _drawn(self, table: Segments, stream: Key, device: torch.device) -> Tensor:
        return draw_places(stream, table, tuple(map(self.capacity, table.lengths)), device)

    def gain(self, n: int) -> float:
        return n / self.capacity(n) if self.unbiased and n else 1.0

    @property
    def traits(self) -> Traits:
        return Traits(linear=self.shared, unbiased=self.unbiased, contraction=not self.unbiased)
