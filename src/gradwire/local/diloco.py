"""DiLoCo: Nesterov momentum on the mean of the workers' differences.

Paper:    Douillard et al., "DiLoCo: distributed low-communication training of language models", 2023.
          https://arxiv.org/abs/2311.08105, Algorithm 1
Formula:  x_r = H inner steps from w;  g = mean over ranks of (w - x_r)
          b = momentum b + g;  w = w - rate (g + momentum b);  x_r = w
Wire:     one float32 difference in H steps
Traits:   exact; two floats per parameter, the outer weights and b
Differs:  as in the paper; H is 500 there. Any codec can carry the differences: codec="int4". With a delay they travel
          during so many steps, and x_r = alpha x_r + (1 - alpha) w, as in streaming_diloco.
Spec:     diloco(H=30), diloco(H=100, rate=0.7, momentum=0.9), diloco(H=30, alpha=0.5, delay=1)
"""

from gradwire.codecs.quantizers import Int4
from gradwire.core import register
from gradwire.engine.presets import dense
from gradwire.local.method import First, LocalMethod


@register("diloco", kind="local")
def diloco(
    H: int = 30,
    rate: float = 0.7,
    momentum: float = 0.9,
    start: int = 0,
    first: First = Int4(),  # noqa: B008 - a frozen value
    alpha: float = 0.0,
    delay: int = 0,
) -> LocalMethod:
    """DiLoCo (Douillard et al. 2023): the outer step has Nesterov momentum; float32 differences."""
    return LocalMethod(H, dense(), rate, momentum, momentum > 0.0, start, first, alpha, delay)
