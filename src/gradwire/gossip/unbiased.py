"""DCD-PSGD and ECD-PSGD: methods for unbiased codecs, with the neighbors' models as one sum and no error feedback."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.codecs import Codec, Memory
from gradwire.core import register
from gradwire.gossip.broadcast import BroadcastMethod, NeighborMessages
from gradwire.gossip.gossip import MixResult
from gradwire.gossip.requirements import require_static_symmetric, require_unbiased
from gradwire.topology import Topology


@dataclass(frozen=True)
class UnbiasedMethod(BroadcastMethod):
    """What DCD and ECD have in common.

    Attributes:
        allow_biased: Whether to run with codecs that the analysis does not cover.
    """

    allow_biased: bool = False
    overlaps = False
    copies_parameters = True

    def check(self, codec: Codec, topology: Topology) -> None:
        require_unbiased(self, codec, self.allow_biased)
        require_static_symmetric(self, topology)


@register("dcd", kind="gossip")
class DCD(UnbiasedMethod):
    """DCD-PSGD: models move only by what was sent, so that all ranks know their neighbors' models exactly.

    Paper:    Tang et al., "Communication compression for decentralized training", NeurIPS 2018.
              https://arxiv.org/abs/1803.06443, Algorithm 1
    Formula:  z_i = s_i + (y_i - x_i) - x_i, y_i: x_i after the optimizer's step;  s_i = sum_j w_ij x_j
              q_i = C(z_i);  x_i = x_i + q_i;  s_i = s_i + sum_j w_ij q_j
    Wire:     one message of the codec to each neighbor
    Traits:   unbiased codecs; others by allow_biased=True. Static symmetric graphs; two more vectors. What a message
              loses of the gradient is lost: there is no consensus step, and no residual. A codec that adds noise of
              much more than |z|^2 (few levels, or random entries scaled by ten) drives replicas apart
    Differs:  neighbors' models are kept as one weighted sum, not one by one
    Spec:     dcd(ring), dcd(ring, allow_biased=True)
    """

    examples = ("dcd(ring)", "dcd(ring, allow_biased=True)")
    memories = ("x_hat", "mixed")

    def message(self, x: Tensor, memory: Memory, step: int) -> Tensor:
        del step
        return memory["mixed"] + (x - memory["x_hat"]) - memory["x_hat"]

    def update(self, x: Tensor, memory: Memory, messages: NeighborMessages, step: int) -> MixResult:
        del x, step
        x_hat = memory["x_hat"] + messages.own
        return MixResult(x_hat, {**memory, "x_hat": x_hat, "mixed": messages.added_to(memory["mixed"])})


@register("ecd", kind="gossip")
class ECD(UnbiasedMethod):
    """ECD-PSGD: neighbors extrapolate each other's models from compressed messages of ever more weight.

    Paper:    Tang et al., "Communication compression for decentralized training", NeurIPS 2018.
              https://arxiv.org/abs/1803.06443, Algorithm 2
    Formula:  x' = sum_j w_ij xhat_j + (y_i - x_i), y_i: x_i after the optimizer's step;
              z_i = (1 - t/2) x_i + (t/2) x';  xhat_i = (1 - 2/t) xhat_i + (2/t) C(z_i);  x_i = x';  t = 1, 2, ...
    Wire:     one message of the codec to each neighbor
    Traits:   unbiased codecs; others by allow_biased=True. Static symmetric graphs; two more vectors. Errors of the
              codec are relative to z, which grows with t, so it needs codecs of little noise
    Differs:  sum_j w_ij xhat_j is kept as one vector, not one by one; all entries follow the formula, also those that a
              selector left out
    Spec:     ecd(ring), ecd(ring, allow_biased=True)
    """

    examples = ("ecd(ring)", "ecd(ring, allow_biased=True)")
    memories = ("before", "mixed")

    def message(self, x: Tensor, memory: Memory, step: int) -> Tensor:
        t = step + 1
        return (1 - t / 2) * memory["before"] + (t / 2) * _after(x, memory)

    def update(self, x: Tensor, memory: Memory, messages: NeighborMessages, step: int) -> MixResult:
        t, after = step + 1, _after(x, memory)
        mixed = (1 - 2 / t) * memory["mixed"] + (2 / t) * messages.added_to(torch.zeros_like(x))
        return MixResult(after, {**memory, "before": after, "mixed": mixed})


def _after(x: Tensor, memory: Memory) -> Tensor:
    return memory["mixed"] + (x - memory["before"])
