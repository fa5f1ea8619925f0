"""Local SGD: the mean of the weights of all workers, every H steps.

Paper:    Stich, "Local SGD converges fast and communicates little", ICLR 2019. https://arxiv.org/abs/1805.09767
          post_local_sgd: Lin et al., "Don't use large mini-batches, use local SGD", ICLR 2020.
          https://arxiv.org/abs/1808.07217
Formula:  x_r = H inner steps from w;  w = w - mean over ranks of (w - x_r);  x_r = w
Wire:     one float32 difference in H steps
Traits:   exact; one float per parameter, the outer weights
Differs:  differences are sent, not weights, so that any codec and feedback can carry them; the inner optimizer may
          be any. post_local_sgd averages gradients in the first steps.
Spec:     local_sgd(H=8), post_local_sgd(H=8, start=1000)
"""

from gradwire.codecs.quantizers import FP32
from gradwire.core import register
from gradwire.engine.presets import dense
from gradwire.local.method import First, LocalMethod


@register("local_sgd", kind="local")
def local_sgd(H: int = 8, rate: float = 1.0, alpha: float = 0.0) -> LocalMethod:
    """Local SGD (Stich, ICLR 2019): the mean of all weights, every H steps."""
    return LocalMethod(H, dense(), rate, alpha=alpha)


@register("post_local_sgd", kind="local")
def post_local_sgd(H: int = 8, start: int = 1000, first: First = FP32()) -> LocalMethod:  # noqa: B008
    """Local SGD after ``start`` dense steps (Lin et al., ICLR 2020): gradients are averaged in these."""
    return LocalMethod(H, dense(), start=start, first=first)
