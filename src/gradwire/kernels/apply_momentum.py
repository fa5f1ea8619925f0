"""AdamW's step with momentum in units of gradients, over frozen denominators; touching memory once."""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from gradwire.kernels.dispatch import kernel

Scalar: TypeAlias = "float | Tensor"  # a number, or, where the host does not know it, one element on the device


class Applied(NamedTuple):
    """What a step touches, one tensor each for every parameter.

    Attributes:
        params: Are changed.
        momenta: In units of gradients.
        denominators: In float32.
        variances: Are multiplied, in order to stay what they are after a correction that counts steps.
    """

    params: Sequence[Tensor]
    momenta: Sequence[Tensor]
    denominators: Sequence[Tensor]
    variances: Sequence[Tensor]


@kernel
def apply_momentum_(first: Tensor, parts: Applied, shrink: float, size: Scalar, ratio: Scalar) -> None:
    """``p = shrink * p + size * (x / denominator)`` and ``variance = ratio * variance``; ``first`` is a parameter.

    Parameters of fewer bits than float32 are rounded once. One pass reads parameter, momentum, denominator and
    variance, and writes parameter and variance: 24 bytes an entry.
    """
    wide = [p if p.dtype.itemsize >= 4 else p.float() for p in parts.params]
    momenta, denominators = [x.float() for x in parts.momenta], list(parts.denominators)
    torch._foreach_mul_(wide, shrink)
    if isinstance(size, Tensor):
        steps = torch._foreach_div(momenta, denominators)
        torch._foreach_mul_(steps, size)
        torch._foreach_add_(wide, steps)
    else:
        torch._foreach_addcdiv_(wide, momenta, denominators, value=size)
    for p, x in zip(parts.params, wide, strict=True):
        if p is not x:
            p.copy_(x)
    if not isinstance(ratio, float) or ratio != 1.0:
        torch._foreach_mul_(list(parts.variances), ratio)
