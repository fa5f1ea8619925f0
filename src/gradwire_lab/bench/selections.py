"""Selections as they are timed: a whole step of compression with error feedback, and the choice alone.

Beside Gaussian gradients there are inputs that are hard to select from. Their time, too, is shown against the
Gaussian's: it must not depend on the values.
"""

from functools import partial

import torch
from torch import Tensor

from gradwire.kernels import fused
from gradwire.kernels.fused import Accumulation
from gradwire_lab.bench import plain
from gradwire_lab.bench.kernel_inputs import RATIO, Case, KernelInputs, Make

_RULE = Accumulation(momentum=0.9)
_HARD = ("same", "jump", "equal", "zeros")  # the same again, a thousand times as large every other step
_METHODS = {"dgc": "dgc", "error_feedback": "error_feedback_topk"}


def _grads(inputs: KernelInputs, kind: str, dtype: torch.dtype) -> list[Tensor]:
    """The gradients of steps, which take turns."""
    one = inputs.normal(filled=RATIO / 2 if kind == "zeros" else 1.0, dtype=dtype)
    if kind == "jump":
        return [one, 1000 * one]
    if kind == "equal":
        return [one.sign()]
    return [one] if kind in ("same", "zeros") else [one, inputs.normal(dtype=dtype)]


def _select(
    inputs: KernelInputs,
    needed: float,
    momentum: bool = False,
    turns: bool = False,
    ratio: float = RATIO,
    kind: str = "gaussian",
    dtype: torch.dtype = torch.float32,
) -> Case:
    """A whole step of compression.

    The memories start as they are after some thousand steps, since young ones grow by much at every step; or at zero
    where that is what makes the input hard, or where they would hide it.
    """
    grads = _grads(inputs, kind, dtype)
    young = kind in ("same", "equal", "zeros")
    old = (
        inputs.normal(0 if young else 300 if momentum else 30),
        inputs.normal(0 if young else 2.3) if momentum else None,
    )
    new = (torch.empty_like(old[0]), torch.empty_like(old[0]) if momentum else None) if turns else old
    counts = inputs.counts(ratio)
    turn = 0

    def step() -> None:
        nonlocal turn, old, new
        turn += 1
        fused.carry_topk_(grads[turn % len(grads)], old, new, _RULE, inputs.lengths, counts, 2)
        old, new = new, old

    return Case(needed, step)


def _topk(inputs: KernelInputs, x: Tensor, ratio: float = RATIO) -> Case:
    counts = inputs.counts(ratio)
    written = 8 * ratio if ratio > RATIO else 0.0
    return Case(4.0 + written, lambda: fused.topk(x, inputs.lengths, counts))


def _torch_dgc(inputs: KernelInputs) -> Case:
    grads = [inputs.normal() for _ in range(2)]
    momentum, residual, (k,) = inputs.normal(2.3), inputs.normal(300), inputs.counts(RATIO)
    turn = 0

    def step() -> None:
        nonlocal turn
        turn += 1
        plain.dgc_(grads[turn % 2], momentum, residual, k)

    return Case(20.0, step, False, True)


# Half of all entries: as many positions and values are written, too.
SELECTIONS: dict[str, Make] = {
    "torch_dgc": _torch_dgc,
    "dgc": partial(_select, needed=20.0, momentum=True),
    "dgc_turns": partial(_select, needed=20.0, momentum=True, turns=True),
    "dgc_bf16": partial(_select, needed=18.0, momentum=True, dtype=torch.bfloat16),
    **{f"dgc_{kind}": partial(_select, needed=20.0, momentum=True, kind=kind) for kind in _HARD},
    "dgc_half": partial(_select, needed=26.0, momentum=True, ratio=0.5),
    "error_feedback_topk": partial(_select, needed=12.0),
    "error_feedback_topk_turns": partial(_select, needed=12.0, turns=True),
    **{f"error_feedback_{kind}": partial(_select, needed=12.0, kind=kind) for kind in _HARD},
    "error_feedback_half": partial(_select, needed=18.0, ratio=0.5),
    "torch_topk": lambda s: Case(4.0, partial(plain.topk, s.x, s.counts(RATIO)[0]), False, True),
    "topk": lambda s: _topk(s, s.x),
    "topk_half": lambda s: _topk(s, s.x, 0.5),
    "topk_zeros": lambda s: _topk(s, s.normal(filled=RATIO / 2)),  # more are wanted than are not zero
    "topk_ties": lambda s: _topk(s, s.normal().sign()),
}

# The same kernel with Gaussian gradients, timed before those that are hard to select from.
GAUSSIAN = {
    **{f"{name}_{kind}": gaussian for name, gaussian in _METHODS.items() for kind in (*_HARD, "half")},
    **{f"topk_{kind}": "topk" for kind in ("half", "zeros", "ties")},
}
