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

from torch import Tensor

from gradwire.codecs.stage import EncodeInput, Selector
from gradwire.core import Key, Traits, check_argument, check_fraction, register
from gradwire.core.decode_cache import memoized
from gradwire.kernels.select import draw_places, share


@register("randomk", kind="selector")
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
    examples = ("randomk(0.01)", "randomk(0.3, shared=False)", "randomk(0.3, unbiased=True)")

    def __post_init__(self) -> None:
        check_fraction(self, "ratio", "randomk(0.01)")
        for name in ("shared", "unbiased"):
            check_argument(self, name, isinstance(getattr(self, name), bool), "True or False")

    def capacity(self, n: int) -> int:
        return share(self.ratio, n)

    def select(self, signal: EncodeInput, key: Key) -> Tensor:
        table, device = signal.segments, signal.target.device
        stream = (key.shared() if self.shared else key).fold("randomk")
        counts = tuple(map(self.capacity, table.lengths))
        # Receivers redraw what the sender drew: among ranks of one process, once is enough.
        return memoized((), (counts, table, stream, device), lambda: draw_places(stream, table, counts, device))

    def gain(self, n: int) -> float:
        return n / self.capacity(n) if self.unbiased and n else 1.0

    @property
    def traits(self) -> Traits:
        return Traits(linear=self.shared, unbiased=self.unbiased, contraction=not self.unbiased)
