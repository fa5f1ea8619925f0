"""Fused steps of error feedback: compensate, select or quantize, and keep the new error, touching memory once.

These definitions compose plain torch calls; faster versions make one pass. All change ``residual`` and ``momentum`` in
place. A gradient entry that is not finite counts as zero, and is reported: nothing of it may reach a memory.
"""

from itertools import pairwise
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from gradwire.core.layout import Flat, in_one_place
from gradwire.kernels import quantize
from gradwire.kernels.dispatch import kernel
from gradwire.kernels.groups import over
from gradwire.kernels.select import top

_MAGNITUDE = 0x7FFFFFFF  # all bits of a float but its sign

Memories: TypeAlias = tuple[Tensor, Tensor | None]  # the residual, and the momentum if there is one
PerSegment: TypeAlias = tuple[int, ...]  # a number for each segment


class Accumulation(NamedTuple):
    """How a gradient enters the memories.

    Without momentum: ``v = decay * v + g``. With it: ``u = m u + g; v = v + u``, or, with nesterov,
    ``u = m (u + g); v = v + u + g``. Every product and sum is rounded by itself.
    """

    momentum: float = 0.0
    nesterov: bool = False
    decay: float = 1.0


class Selected(NamedTuple):
    """What a selection found.

    Attributes:
        indices: Rising flat positions.
        values: What lies there.
        nonfinite: A bool tensor: some gradient entry was not finite.
    """

    indices: Tensor
    values: Tensor
    nonfinite: Tensor


@kernel
def topk(x: Tensor, lengths: PerSegment, counts: PerSegment) -> Tensor:
    """Rising flat positions of the ``counts[s]`` largest magnitudes of each segment; of equals the first win.

    Magnitudes are compared by their bits, so that NaN is larger than infinity.
    """
    size, found, start = x.float().view(torch.int32) & _MAGNITUDE, [], 0
    for n, k in zip(lengths, counts, strict=True):
        found.append(top(size[start : start + n], k) + start)
        start += n
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.int64, device=x.device)


@kernel
def finite_or_zero(x: Tensor) -> tuple[Tensor, Tensor]:
    """The same entries, with zeros for those that are not finite; and whether there were any."""
    finite = torch.isfinite(x)
    return torch.where(finite, x, 0.0), ~finite.all()


@kernel
def accumulate_(
    grad: Flat, residual: Tensor, momentum: Tensor | None, rule: Accumulation, before: Tensor | None = None
) -> Tensor:
    """Add a gradient to the memories; ``residual`` becomes the target. Returns whether the gradient was nonfinite.

    What the residual was may lie in ``before``, which stays as it is.
    """
    if before is not None:
        residual.copy_(before)
    values = in_one_place(grad)
    finite = torch.isfinite(values)
    g = torch.where(finite, values, 0.0)
    if momentum is None:
        residual.copy_(g + rule.decay * residual)
    elif rule.nesterov:
        momentum.copy_(rule.momentum * (momentum + g))
        residual.copy_(residual + momentum + g)
    else:
        momentum.copy_(rule.momentum * momentum + g)
        residual.copy_(residual + momentum)
    return ~finite.all()


@kernel
def carry_topk_(
    grad: Flat,
    before: Memories,
    after: Memories,
    rule: Accumulation,
    lengths: PerSegment,
    counts: PerSegment,
    subtract: int = 0,
) -> Selected:
    """`accumulate_` from memories that are read to others, or the same, that are written; then `topk` of the target.

    ``subtract``: 1 also takes what is selected off the residual, by `subtract_sent_` of values that are sent as they
    are, and 2 masks the momentum, too.
    """
    for old, new in zip(before, after, strict=True):
        if old is not None and new is not None and old is not new:
            new.copy_(old)
    nonfinite = accumulate_(grad, *after, rule)
    indices = topk(after[0], lengths, counts)
    values = after[0][indices]
    if subtract:
        subtract_sent_(after[0], after[1] if subtract > 1 else None, indices, values)
    return Selected(indices, values, nonfinite)


@kernel
def subtract_sent_(residual: Tensor, momentum: Tensor | None, indices: Tensor, sent: Tensor) -> None:
    """Take what was sent off the error, and mask the momentum, if given, where something was sent."""
    residual.index_add_(0, indices, sent, alpha=-1)
    if momentum is not None:
        momentum.index_fill_(0, indices, 0.0)


@kernel
def feedback_sum_(
    grad: Flat, before: Memories, after: Memories, rule: Accumulation, limit: float
) -> tuple[Tensor, Tensor]:
    """Error feedback of values that are sent as they are, but for those beyond a limit, because they are added up.

    Memories, residual and momentum, are read, and others, or the same, are written. Returns what is sent, and whether
    the gradient was nonfinite.
    """
    if before[1] is not None and after[1] is not None and before[1] is not after[1]:
        after[1].copy_(before[1])
    nonfinite = accumulate_(grad, *after, rule, None if before[0] is after[0] else before[0])
    sent = after[0].clamp(-limit, limit)
    after[0].sub_(sent)
    return sent, nonfinite


@kernel
def feedback_sign_(
    grad: Flat, residual: Tensor, decay: float, lengths: PerSegment, norm: bool, before: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Error feedback with `sign`: the message of ``grad + decay * residual``, and whether the gradient was nonfinite.

    What the residual was may lie in ``before``, which stays as it is.
    """
    nonfinite = accumulate_(grad, residual, None, Accumulation(decay=decay), before)
    counts = torch.tensor(lengths, dtype=torch.int64, device=residual.device)
    data = quantize.sign_encode(residual, counts, norm)
    residual.sub_(quantize.sign_decode(data, counts))
    return data, nonfinite


@kernel
def feedback_integer_(
    grad: Flat, residual: Tensor, decay: float, lengths: PerSegment, bits: int, block: int, before: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`feedback_sign_` of `int8`, `int4` or `int2`."""
    nonfinite = accumulate_(grad, residual, None, Accumulation(decay=decay), before)
    counts = torch.tensor(lengths, dtype=torch.int64, device=residual.device)
    data = quantize.integer_encode(residual, counts, bits, block)
    residual.sub_(quantize.integer_decode(data, counts, bits, block))
    return data, nonfinite


@kernel
def merge_sign(
    messages: Tensor, error: Tensor | None, lengths: PerSegment, norm: bool, out: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The server's part between two legs of `sign`: the mean of messages, uint8[ranks, bytes], plus an error, encoded.

    Returns the message and, if there was an error, the new one: in new memory, or in ``out``, which may be where the
    old one lies.
    """
    counts = torch.tensor(lengths, dtype=torch.int64, device=messages.device)
    mine = _mean([quantize.sign_decode(row, counts) for row in messages], error)
    data = quantize.sign_encode(mine, counts, norm)
    return data, None if error is None else torch.sub(mine, quantize.sign_decode(data, counts), out=out)


@kernel
def merge_integer(
    messages: Tensor, error: Tensor | None, lengths: PerSegment, bits: int, block: int
) -> tuple[Tensor, Tensor | None]:
    """`merge_sign` of `int8`, `int4` or `int2`."""
    counts = torch.tensor(lengths, dtype=torch.int64, device=messages.device)
    mine = _mean([quantize.integer_decode(row, counts, bits, block) for row in messages], error)
    data = quantize.integer_encode(mine, counts, bits, block)
    return data, None if error is None else mine - quantize.integer_decode(data, counts, bits, block)


@kernel
def scatter_mean(values: Tensor, indices: Tensor, bounds: tuple[int, ...], n: int, world: int) -> Tensor:
    """Add several ranks' sparse messages, ``bounds[r]:bounds[r + 1]`` being rank r's, in rank order; over ``world``.

    Positions rise within a message.
    """
    out = values.new_zeros(n)
    for start, stop in pairwise(bounds):
        out.index_add_(0, indices[start:stop], values[start:stop])
    return over(out, world)


@kernel
def scatter_mean_(out: Flat, values: Tensor, indices: Tensor, bounds: tuple[int, ...], world: int) -> None:
    """`scatter_mean` of as many entries as ``out`` has, written there."""
    out.copy_(scatter_mean(values, indices, bounds, out.numel(), world))


def _mean(parts: list[Tensor], error: Tensor | None) -> Tensor:
    """Parts added in their order, over their number, and an error on top of it."""
    total = torch.zeros_like(parts[0])
    for part in parts:
        total += part
    mean = over(total, len(parts))
    return mean if error is None else mean + error
