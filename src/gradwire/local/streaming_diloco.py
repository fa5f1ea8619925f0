"""Streaming DiLoCo: fragments of the model are sent in turn, in few bits, while training goes on.

Paper:    Douillard et al., "Streaming DiLoCo with overlapping communication", 2025. https://arxiv.org/abs/2501.18512,
          Algorithm 2
Formula:  for each fragment f, at steps t with t mod H = f H / fragments:  g_f = mean over ranks of C(w_f - x_rf), sent
          delay steps later:  b_f = momentum b_f + g_f;  w_f = w_f - rate (g_f + momentum b_f)
                              x_rf = alpha x_rf + (1 - alpha) w_f
Wire:     one difference of each fragment in H steps, four bits a value
Traits:   as the quantizer; three floats per parameter, the outer weights, b, and errors, which values=fp32 has none of
Differs:  values are int4 with error feedback where the paper has floats of four bits and none; feedback='none'
          leaves it out. H is 30, where most of its runs have 100. Layers are dealt to fragments in turn, as its strided
          pattern does; names up to a number, such as blocks.3, are a layer. A fragment's first round is shorter than H.
Spec:     streaming_diloco(H=30, fragments=3), streaming_diloco(H=100, fragments=('blocks.[0-2].*', '*'), delay=5)
"""

from gradwire.codecs import Quantizer
from gradwire.codecs.quantizers import Int4
from gradwire.core import register
from gradwire.engine import method
from gradwire.local.method import First, LocalMethod


@register("streaming_diloco", kind="local")
def streaming_diloco(
    H: int = 30,
    fragments: int | tuple[str, ...] = 3,
    values: Quantizer = Int4(),  # noqa: B008 - a frozen value
    rate: float = 0.7,
    momentum: float = 0.9,
    start: int = 0,
    first: First = Int4(),  # noqa: B008 - a frozen value
    alpha: float = 0.5,
    delay: int = 1,
    stagger: bool = True,
) -> LocalMethod:
    """Streaming DiLoCo (Douillard et al. 2025): fragments are sent in turn, in four bits, during the next steps."""
    outer = rate, momentum, momentum > 0.0
    return LocalMethod(H, method(values), *outer, start, first, alpha, delay, fragments, stagger)
