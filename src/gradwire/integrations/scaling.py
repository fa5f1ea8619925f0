"""Scaling: what a GradScaler needs. All ranks must skip a step together, and back off together."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from gradwire.comm.backend import Backend
from gradwire.core.requests import Max, Scope
from gradwire.engine.gradients import Grads
from gradwire.engine.step import StepResult


def scale_of(scaler: torch.amp.GradScaler | None) -> float:
    """What the loss was multiplied by. The state of a wire is in units of the unscaled gradient."""
    return 1.0 if scaler is None else float(scaler.get_scale())


def overflows(grads: Grads, backend: Backend, device: torch.device) -> bool:
    """Whether a gradient of any rank is not finite; found out before anything is encoded."""
    dense = [g for g in grads.values() if g is not None and g.layout == torch.strided]
    bad = torch.tensor([int(not all(bool(torch.isfinite(g).all()) for g in dense))], device=device)
    scopes: tuple[Scope, ...] = ("world",) if backend.host_layout is None else ("local", "across")
    for scope in scopes:
        (bad,) = backend.answer([Max(bad, scope)])
    return bool(bad.item())


def infinite(parameters: Mapping[str, nn.Parameter], grads: Grads) -> StepResult:
    """Updates of infinity: a GradScaler looks for them on each rank for itself, so all of them back off."""
    updates: dict[str, Tensor] = {}
    for name, p in parameters.items():
        grad = grads.get(name)
        usable = grad is not None and grad.layout == torch.strided
        updates[name] = grad.detach().fill_(torch.inf) if usable and grad is not None else torch.full_like(p, torch.inf)
    return StepResult(updates, skipped=True)
