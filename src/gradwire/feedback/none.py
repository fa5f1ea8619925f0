"""No feedback: what is lost is lost.

Paper:    the compressors of Alistarh et al. (QSGD) and Wen et al. (TernGrad) are used this way
Formula:  target = g;  nothing is kept
Wire:     nothing
Traits:   no memory; sound with unbiased codecs, which err on either side alike
Differs:  as in the papers
Spec:     none
"""

from torch import Tensor

from gradwire.codecs import Decoded, Memory
from gradwire.core import register
from gradwire.feedback.feedback import Feedback


@register("none", kind="feedback")
class NoFeedback(Feedback):
    """Drop the error."""

    examples = ("none",)
    keeps_error = False
    needs_decoded = False

    def compensate(self, grad: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        return grad, memory

    def update_memory(self, target: Tensor, sent: Decoded, memory: Memory) -> Memory:
        return memory
