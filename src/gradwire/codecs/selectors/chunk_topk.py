"""Chunk top-k: keep the k largest entries of every chunk.

Paper:    Chen et al., "ScaleCom: scalable sparsified gradient compression for
          communication-efficient distributed training", NeurIPS 2020.
          https://arxiv.org/abs/2104.11125
Formula:  C(x)_i = x_i if |x_i| is among the k largest of its chunk, else 0
Wire:     indices  min(k, length) per chunk, as the index coder packs them
          values   as many, as the quantizer packs them
Traits:   contraction, |x - C(x)|^2 <= (1 - k/chunk) |x|^2; fixed
Differs:  only the chunk-wise choice is the paper's: each rank chooses for itself, where there one
          leader chooses for all. Of equals, the first win.
Spec:     chunk_topk(4), chunk_topk(1, chunk=64)
"""

from torch import Tensor

from gradwire.codecs.stage import EncodeInput, Selector
from gradwire.core import Key, Traits, check_argument, is_count, register
from gradwire.kernels.chunks import chunk_topk


@register("chunk_topk", kind="selector")
class ChunkTopK(Selector):
    """The largest entries of each chunk; chunks are consecutive entries, and the last of a segment is shorter.

    Attributes:
        k: How many entries a chunk sends.
        chunk: The length of a chunk.
    """

    k: int
    chunk: int = 4096
    traits = Traits(contraction=True)
    examples = ("chunk_topk(4)", "chunk_topk(2, chunk=8)")

    def __post_init__(self) -> None:
        check_argument(self, "chunk", is_count(self.chunk), "a whole number of entries from 1, for example 4096")
        check_argument(self, "k", is_count(self.k) and self.k <= self.chunk, f"a whole number from 1 to {self.chunk}")

    def capacity(self, n: int) -> int:
        return n // self.chunk * self.k + min(self.k, n % self.chunk)

    def select(self, signal: EncodeInput, key: Key) -> Tensor:
        return chunk_topk(signal.target, signal.segments.lengths, self.k, self.chunk)
