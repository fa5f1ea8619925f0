"""The passes of AdamW's methods as they are timed: ``onebit_adam``'s signs of momentum, and ``dgc_adam``'s selection.

Of ``onebit_adam``, a pass reads gradient, momentum, denominator and residual, and writes the residual, a bit for each
entry and a scale for each block: 20.125 bytes and a little. Of ``dgc_adam``, momentum is written as well: 24 bytes.
The server's part between two legs, in a world of one, reads and writes its error. AdamW reads parameter, momentum and
denominator, and writes the parameter: 16 bytes.
"""

from functools import partial

import torch
from torch import Tensor

from gradwire.kernels import fused, quantize
from gradwire.kernels.apply_momentum import Applied, apply_momentum_
from gradwire.kernels.groups import block_lengths
from gradwire.kernels.momentum import Momentum, momentum_sign_, momentum_topk_, next_momentum_
from gradwire_lab.bench.kernel_inputs import Case, KernelInputs, Make, on_memory

_PER = 4096
_BETA = 0.9
_RATIO = 0.01
_CODES = 1 / 8 + 4 / _PER  # bytes of an entry in a message


def _momentum(inputs: KernelInputs) -> Momentum:
    return Momentum(inputs.normal(), inputs.normal().abs() + 0.1, _BETA)


def _onebit_adam(inputs: KernelInputs, lane: bool) -> Case:
    """All that happens to a gradient before the first leg."""
    momentum, lengths = _momentum(inputs), block_lengths(inputs.lengths, _PER)

    def encode(memory: Tensor, before: Tensor | None = None) -> None:
        momentum_sign_(inputs.x, memory, momentum, 1.0, lengths, False, before)

    return on_memory(20 + _CODES, encode, inputs.normal(), lane)


def _torch_onebit_adam(inputs: KernelInputs) -> Case:
    """The same as a person would write it."""
    (last, denominator, _), residual = _momentum(inputs), inputs.normal()
    n = inputs.n // _PER * _PER
    assert denominator is not None
    weights = 2 ** torch.arange(8, device=inputs.device, dtype=torch.uint8)

    def encode() -> None:
        target = (_BETA * last).addcdiv_(inputs.x, denominator, value=1 - _BETA).add_(residual)
        signs = target >= 0
        scale = target[:n].view(-1, _PER).abs().mean(1, keepdim=True)
        residual.copy_(target)
        residual[:n].view(-1, _PER).sub_(torch.where(signs[:n].view(-1, _PER), scale, -scale))
        (signs[:n].view(-1, 8) * weights).sum(1, dtype=torch.uint8)

    return Case(20 + _CODES, encode, False, True)


def _signs(inputs: KernelInputs, feedback: bool) -> Case:
    """Signs of blocks alone, or with error feedback."""
    lengths, residual = block_lengths(inputs.lengths, _PER), inputs.normal()
    if feedback:
        run = partial(fused.feedback_sign_, inputs.x, residual, 1.0, lengths, False)
        return Case(12 + _CODES, run)
    table = torch.tensor(lengths, device=inputs.device)
    return Case(4 + _CODES, lambda: quantize.sign_encode(inputs.x, table, False))


def _merge(inputs: KernelInputs) -> Case:
    """Of one rank, whose slice is all of it: the most that a server ever has to do."""
    lengths, error = block_lengths(inputs.lengths, _PER), inputs.normal()
    rows = quantize.sign_encode(inputs.x, torch.tensor(lengths, device=inputs.device), False)[None]
    return Case(8 + 2 * _CODES, lambda: fused.merge_sign(rows, error, lengths, False))


def _apply(inputs: KernelInputs) -> Case:
    """AdamW's step."""
    momentum = _momentum(inputs)
    assert momentum.denominator is not None
    whole = (inputs.normal(), momentum.last, momentum.denominator)
    parts = Applied(*(x.split(list(inputs.lengths)) for x in whole))
    return Case(16.0, lambda: apply_momentum_(parts.params[0], parts, 0.999, -1e-5))


def _dgc_adam(inputs: KernelInputs) -> Case:
    """A whole step of compression, of values that are sent as they are."""
    (last, denominator, beta), residual, counts = _momentum(inputs), inputs.normal(30), inputs.counts(_RATIO)

    def step() -> None:
        momentum = Momentum(last, denominator, beta)
        momentum_topk_(inputs.x, (residual, residual), momentum, last, 1, 1.0, inputs.lengths, counts)

    return Case(24.0, step)


def _next_momentum(inputs: KernelInputs) -> Case:
    momentum, out = _momentum(inputs), torch.empty_like(inputs.x)
    return Case(16.0, lambda: next_momentum_(inputs.x, momentum, out))


MOMENTA: dict[str, Make] = {
    "torch_onebit_adam": _torch_onebit_adam,
    "onebit_adam": partial(_onebit_adam, lane=False),
    "onebit_adam_lane": partial(_onebit_adam, lane=True),
    "dgc_adam": _dgc_adam,
    "next_momentum": _next_momentum,
    "adamw_apply_momentum": _apply,
    "merge_block_sign": _merge,
    "block_sign_encode": partial(_signs, feedback=False),
    "feedback_block_sign": partial(_signs, feedback=True),
}
