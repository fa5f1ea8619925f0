"""Momentum that a gradient enters, in one pass."""

import numpy as np
import torch
from numba import prange
from torch import Tensor

from gradwire.core.layout import Flat
from gradwire.kernels.cpu.halves import gradient, stretch
from gradwire.kernels.cpu.pieces import whole
from gradwire.kernels.cpu.threads import compiled, in_turn, serial
from gradwire.kernels.momentum import Momentum

_ONE, _ZERO = np.float32(1.0), np.float32(0.0)


@serial
def _enter(g, last, denominator, beta, rest, out):
    """Returns whether all quotients were finite. Without denominators, they are the gradient."""
    fine = True
    for j in range(g.size):
        x = g[j]
        if denominator.size:
            x = x / (denominator[j] if denominator[j] > _ZERO else _ONE)
        finite = abs(x) < np.inf
        fine &= finite
        out[j] = beta * last[j] + rest * (x if finite else _ZERO)
    return fine


@compiled
def _advance(grad, last, denominator, beta, rest, out, pieces, nonfinite):
    for t in prange(nonfinite.size):
        a, b = pieces.start[t], pieces.stop[t]
        fine = _enter(stretch(grad, a, b), last[a:b], denominator[a:b], beta, rest, out[a:b])
        nonfinite[t] = not fine


@in_turn
def next_momentum_(grad: Flat, momentum: Momentum, out: Tensor) -> Tensor:
    pieces = whole((grad.numel(),))
    nonfinite = np.zeros(pieces.start.size, dtype=np.bool_)
    denominator = np.empty(0, dtype=np.float32) if momentum.denominator is None else momentum.denominator.numpy()
    numbers = np.float32(momentum.beta), np.float32(1.0 - momentum.beta)
    _advance(gradient(grad), momentum.last.numpy(), denominator, *numbers, out.numpy(), pieces, nonfinite)
    return torch.tensor(bool(nonfinite.any()))
