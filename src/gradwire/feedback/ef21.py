"""EF21: send how the gradient differs from the estimate that all ranks have of it.

Paper:    Richtarik, Sokolov, Fatkhullin, "EF21: a new, simpler, theoretically better, and practically faster error
          feedback", NeurIPS 2021. https://arxiv.org/abs/2106.05203, Algorithm 2
Formula:  target = g - h;  h = h + C(target);  G = G + mean over ranks of C(target);  the update is G
Wire:     nothing
Traits:   h tends to the gradient where the gradient settles; two floats per parameter
Differs:  as in the paper, with h and G starting at zero
Spec:     ef21
"""

from typing import ClassVar

from torch import Tensor

from gradwire.codecs import Decoded, Memory
from gradwire.core import register
from gradwire.feedback.feedback import Feedback


class Estimates(Feedback):
    """A rule whose ranks keep an estimate of what they target, and the mean of all estimates, which is the update."""

    def update_memory(self, target: Tensor, sent: Decoded, memory: Memory) -> Memory:
        return {**memory, "estimate": sent.add_to(memory["estimate"])}

    def finalize(self, mean: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        update = memory["estimate_mean"] + mean
        return update, {**memory, "estimate_mean": update}


@register("ef21", kind="feedback")
class EF21(Estimates):
    """Compress differences; the group keeps the running mean."""

    examples = ("ef21",)
    memories: ClassVar[dict[str, str]] = {"estimate": "mean", "estimate_mean": "same"}

    def compensate(self, grad: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        return grad - memory["estimate"], memory
