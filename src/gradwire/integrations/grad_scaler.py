"""Scaling: what a GradScaler needs. All ranks must skip a step together, and back off together.

Without a scaler, overflow is reported by the status of a step (`engine/status.py`), which `Engine.finish` reads.
"""

import gc
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

from gradwire.comm.backend import Backend
from gradwire.core import Max, Scope
from gradwire.engine import Grads, StepResult
from gradwire.integrations.model import local_part


def scale_of(scaler: GradScaler | None) -> float:
    """The factor of the current gradients. The state of a wire is in units of the unscaled gradient."""
    return 1.0 if scaler is None or _unscaled(scaler) else float(scaler.get_scale())


def back_off(scaler: GradScaler) -> None:
    """Have the scaler skip the step of optimizers whose gradients it has unscaled, and checked, already."""
    for state in _unscaled(scaler):
        for found_inf in state["found_inf_per_device"].values():
            found_inf.fill_(1.0)


def _unscaled(scaler: GradScaler) -> list[dict[str, Any]]:
    """The states of optimizers for which ``scaler.unscale_`` was called, and ``scaler.step`` was not."""
    states = scaler._per_optimizer_states if scaler.is_enabled() else {}
    return [state for state in states.values() if state["stage"] is OptState.UNSCALED]


def has_scaler(optimizer: Optimizer) -> bool:
    """Whether a GradScaler has unscaled an optimizer's gradients of this step, or is having it step.

    An optimizer does not refer to its scaler, but every object refers to its class.
    """
    kinds = GradScaler, *GradScaler.__subclasses__()
    scalers = [x for x in gc.get_referrers(*kinds) if isinstance(x, GradScaler) and x.is_enabled()]
    return any(id(optimizer) in scaler._per_optimizer_states for scaler in scalers)


def overflows(grads: Grads, backend: Backend, device: torch.device) -> bool:
    """Whether a gradient of any rank is not finite; found out before anything is encoded."""
    dense = [g for g in grads.values() if g is not None and g.layout == torch.strided]
    nonfinite = torch.tensor([int(not all(bool(torch.isfinite(g).all()) for g in dense))], device=device)
    scopes: tuple[Scope, ...] = ("world",) if backend.host_layout is None else ("host", "across")
    for scope in scopes:
        (nonfinite,) = backend.answer([Max(nonfinite, scope)])
    return bool(nonfinite.item())


def infinite(parameters: Mapping[str, nn.Parameter], grads: Grads) -> StepResult:
    """Updates of infinity: a GradScaler looks for them on each rank for itself, so all of them back off."""
    updates: dict[str, Tensor] = {}
    for name, p in parameters.items():
        grad = grads.get(name)
        usable = grad is not None and grad.layout == torch.strided
        updates[name] = (
            grad.detach().fill_(torch.inf) if usable and grad is not None else torch.full_like(local_part(p), torch.inf)
        )
    return StepResult(updates, skipped=True)
