"""MuLoCo: DiLoCo around Muon.

Paper:    Therien et al., "MuLoCo: Muon is a practical inner optimizer for DiLoCo", 2025. https://arxiv.org/abs/2505.23725
Formula:  as diloco, with inner steps of Muon for matrices
Wire:     one difference in H steps: float32, or of four or two bits with values=
Traits:   as the quantizer; two floats per parameter, the outer weights and b, and a third where errors are kept
Differs:  momentum 0.6 is that of the paper's runs with one worker. Muon is the user's own: torch.optim.Muon takes
          matrices only, so that two optimizers are passed. Another inner optimizer is warned of.
Spec:     muloco(H=30), muloco(H=30, values=int4), muloco(H=30, values=int2)
"""

from gradwire.codecs import Quantizer
from gradwire.codecs.quantizers import FP32, Int4
from gradwire.core import register
from gradwire.engine import method
from gradwire.local.method import First, LocalMethod


@register("muloco", kind="local")
def muloco(
    H: int = 30,
    values: Quantizer = FP32(),  # noqa: B008 - a frozen value
    rate: float = 0.7,
    momentum: float = 0.6,
    start: int = 0,
    first: First = Int4(),  # noqa: B008 - a frozen value
    alpha: float = 0.0,
    delay: int = 0,
) -> LocalMethod:
    """MuLoCo (Therien et al. 2025): DiLoCo around Muon, which the loop brings along."""
    outer = rate, momentum, momentum > 0.0
    return LocalMethod(H, method(values), *outer, start, first, alpha, delay, inner="Muon")
