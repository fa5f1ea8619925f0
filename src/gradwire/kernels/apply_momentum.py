"""AdamW's step with momentum in units of gradients, over frozen denominators; touching memory once."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.kernels.dispatch import kernel


class Applied(NamedTuple):
    """What a step touches, one tensor each for every parameter.

    Attributes:
        params: Are changed.
        momenta: In units of gradients.
        denominators: In float32.
    """

    params: Sequence[Tensor]
    momenta: Sequence[Tensor]
    denominators: Sequence[Tensor]


@kernel
def apply_momentum_(first: Tensor, parts: Applied, shrink: float, size: float) -> None:
    """``p = shrink * p + size * (x / denominator)``; ``first`` is a parameter.

    Parameters of fewer bits than float32 are rounded once. One pass reads parameter, momentum and denominator, and
    writes the parameter: 16 bytes an entry.
    """
    wide = [p if p.dtype.itemsize >= 4 else p.float() for p in parts.params]
    torch._foreach_mul_(wide, shrink)
    torch._foreach_addcdiv_(wide, [x.float() for x in parts.momenta], list(parts.denominators), value=size)
    for p, x in zip(parts.params, wide, strict=True):
        if p is not x:
            p.copy_(x)
