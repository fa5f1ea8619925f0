"""SparseLoCo: few entries of every chunk of the differences, with decayed error feedback.

Paper:    Sarfi et al., "Communication efficient LLM pre-training with SparseLoCo", 2025.
          https://arxiv.org/abs/2508.15706
Formula:  x_r = H inner steps from w;  t_r = decay e_r + (w - x_r);  c_r = the k largest of every chunk of t_r
          e_r = t_r - c_r;  w_i = w_i - rate * (sum of c_ri) / (number of ranks that sent entry i);  x_r = w
          keep=1: x_r = w - e_r, and the next difference is taken from there
Wire:     k positions and signs, and one scale, for every chunk, once in H steps; scales are float32, or bfloat16 with
          scales='bf16'; 1-D tensors as float16
Traits:   two floats per parameter, the outer weights and e_r
Differs:  values are signs with a scale for each chunk, where the paper has two bits and scales for whole tensors; the
          scale is the mean magnitude of what is sent. 1-D tensors are sent whole. keep is not in the
          paper. Gradients are then taken where a worker's own unsent steps have led. That helps with H=1, and harms
          with H=5
Spec:     sparseloco(H=5), sparseloco(H=30, k=64, chunk=4096, scales='bf16'), sparseloco(H=1, keep=1.0, start=256)
"""

from gradwire.codecs.quantizers import Int4, Sign
from gradwire.codecs.selectors import ChunkTopK
from gradwire.core import register
from gradwire.engine import Method
from gradwire.exchanges import AllGather
from gradwire.feedback import Residual
from gradwire.local.method import First, LocalMethod


@register("sparseloco", kind="local")
def sparseloco(
    H: int = 15,
    k: int = 64,
    chunk: int = 4096,
    rate: float = 1.0,
    decay: float = 0.95,
    scales: str = "fp32",
    start: int = 0,
    first: First = Int4(),  # noqa: B008 - a frozen value
    alpha: float = 0.0,
    delay: int = 0,
    keep: float = 0.0,
) -> LocalMethod:
    """SparseLoCo (Sarfi et al. 2025): signs of each chunk's ``k`` largest, averaged over their senders."""
    chain = ChunkTopK(k, chunk) | Sign(per=k, scales=scales)
    message = Method(((0, chain),), Residual(decay), AllGather(mean="senders"))
    return LocalMethod(H, message, rate, start=start, first=first, alpha=alpha, delay=delay, keep=keep)
