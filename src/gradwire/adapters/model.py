"""The user's model: which parameters take part, under which names."""

from collections.abc import Iterable

import torch
from torch import nn


def trainable(named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, nn.Parameter]:
    """Parameters that want gradients, by name, as the module would call them uncompiled.

    Raises:
        ValueError: There is none, or one whose gradient cannot be compressed.
    """
    chosen = {}
    for name, parameter in named:
        name = name.replace("_orig_mod.", "")  # what torch.compile puts before a name
        if parameter.requires_grad:
            _check(name, parameter)
            chosen[name] = parameter
    if not chosen:
        raise ValueError("there is no trainable parameter to synchronize; pass a model with requires_grad=True ones")
    return chosen


def refuse_sparse(model: nn.Module) -> None:
    """Sparse embedding gradients would fail at the first step, on one rank after the other; say so at once."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ValueError(
                f"the embedding {name!r} makes sparse gradients, and only dense ones are compressed; "
                "build it with sparse=False"
            )


def _check(name: str, parameter: nn.Parameter) -> None:
    if parameter.is_complex():
        raise ValueError(f"the parameter {name!r} is complex; keep its real and imaginary parts apart instead")
    if not parameter.is_floating_point():
        raise ValueError(f"the parameter {name!r} is {parameter.dtype}; only floating-point gradients are compressed")


def home(parameters: Iterable[nn.Parameter]) -> torch.device:
    """Where the flat buffers live: with the first parameter."""
    return next(iter(parameters)).device
