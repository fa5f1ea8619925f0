"""Momentum that a gradient enters before it is compressed, over AdamW's denominators; touching memory once.

The definitions compose plain torch calls; faster versions make one pass. A gradient entry that is not finite, or is not
once it is divided, counts as zero, and is reported: nothing of it may reach a memory.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.core.layout import Flat, in_one_place
from gradwire.kernels.dispatch import kernel
from gradwire.kernels.fused import Accumulation, Selected, carry_topk_, feedback_sign_, scatter_mean_
from gradwire.kernels.quantize import sign_decode


class Momentum(NamedTuple):
    """What a gradient makes the next momentum of: ``beta * last + (1 - beta) * (grad / denominator)``.

    Every product, quotient and sum is rounded by itself.

    Attributes:
        last: The momentum so far.
        denominator: Where it is not positive, one; None: one everywhere.
        beta: The share of the momentum that stays.
    """

    last: Tensor
    denominator: Tensor | None
    beta: float


@kernel
def next_momentum_(grad: Flat, momentum: Momentum, out: Tensor) -> Tensor:
    """Write the next momentum to ``out``, which may be the last one. Returns whether the gradient was nonfinite."""
    last, denominator, beta = momentum
    g = in_one_place(grad)
    x = g.float() if denominator is None else g / denominator.where(denominator > 0, 1.0)
    finite = torch.isfinite(x)
    out.copy_(beta * last + (1.0 - beta) * torch.where(finite, x, 0.0))
    return ~finite.all()


@kernel
def momentum_sign_(
    grad: Flat,
    residual: Tensor,
    momentum: Momentum,
    decay: float,
    lengths: tuple[int, ...],
    norm: bool,
    before: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`next_momentum_`, then `feedback_sign_` of it. The next momentum goes to ``out``, or nowhere.

    A version in one pass reads gradient, momentum, denominator and residual, and writes the residual and the signs:
    20.125 bytes for each entry, or 24.125 with ``out``.
    """
    following = torch.empty_like(residual) if out is None else out
    nonfinite = next_momentum_(grad, momentum, following)
    data, _ = feedback_sign_(following, residual, decay, lengths, norm, before)
    return data, nonfinite


@kernel
def momentum_topk_(
    grad: Flat,
    residuals: tuple[Tensor, Tensor],
    momentum: Momentum,
    out: Tensor | None,
    subtract: int,
    decay: float,
    lengths: tuple[int, ...],
    counts: tuple[int, ...],
) -> Selected:
    """`next_momentum_`, then `carry_topk_` of it, from the first residual to the second.

    The next momentum goes to ``out``, or nowhere. ``subtract``: 2 masks this momentum. A version in one pass reads
    gradient, momentum, denominator and residual, and writes momentum and residual: 24 bytes for each entry.
    """
    following = torch.empty_like(residuals[1]) if out is None else out
    nonfinite = next_momentum_(grad, momentum, following)
    before, after = ((residual, None) for residual in residuals)
    found = carry_topk_(following, before, after, Accumulation(decay=decay), lengths, counts, min(subtract, 1))
    if subtract > 1:
        following.index_fill_(0, found.indices, 0.0)
    return found._replace(nonfinite=nonfinite)


@kernel
def scatter_product_(
    out: Flat, values: Tensor, indices: Tensor, bounds: tuple[int, ...], world: int, factor: Tensor
) -> None:
    """`scatter_mean_` to ``out``, times ``factor``, of which only the entries at ``indices`` count."""
    dense = out if isinstance(out, Tensor) else torch.empty_like(factor)
    scatter_mean_(dense, values, indices, bounds, world)
    # Where ranks sent the same entry, each writes the same there.
    dense.index_copy_(0, indices, dense[indices] * factor[indices])
    if dense is not out:
        out.copy_(dense)


@kernel
def sign_decode_times_(data: Tensor, lengths: Tensor, out: Tensor, factor: Tensor, product: Flat) -> None:
    """`sign_decode` to ``out``, and what it makes times ``factor`` to ``product``.

    A version in one pass reads the signs and the factor, and writes both: 12.125 bytes for each entry.
    """
    sign_decode(data, lengths, out)
    if isinstance(product, Tensor):
        torch.mul(out, factor, out=product)
    else:
        product.copy_(out * factor)
