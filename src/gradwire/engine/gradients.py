"""Gradients: what the host sees of them before a step."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradwire.engine.lane import Lane
from gradwire.engine.plan import Plan
from gradwire.engine.status import MISSING, UNSUPPORTED
from gradwire.engine.views import GradViews

Grads = Mapping[str, Tensor | None]


class FixedGrads(dict[str, Tensor | None]):
    """Gradients by name that stay where they are. Nothing in here is replaced, so it is enough to look at it once."""


def views_of(lane: Lane, grads: Grads, device: torch.device, factor: float = 1.0) -> GradViews:
    """Where a lane's gradients lie. One that is missing, or cannot be compressed, counts as zeros."""
    dense = []
    for name, shape in zip(lane.tensors.names, lane.tensors.shapes, strict=True):
        grad = grads[name]
        dense.append(torch.zeros(shape, device=device) if grad is None or _is_sparse(grad) else grad)
    has_grad = [grads[name] is not None for name in lane.tensors.names]
    return GradViews(dense, device, factor, has_grad, isinstance(grads, FixedGrads))


def views_and_status(
    lanes: Sequence[Lane], grads: Grads, device: torch.device, factor: float = 1.0
) -> tuple[list[GradViews], Tensor]:
    """Where the gradients of some lanes lie; and what the host can see of them, uint8[1] on the device."""
    mine = [grads[name] for lane in lanes for name in lane.tensors.names]
    sparse = any(grad is not None and _is_sparse(grad) for grad in mine)
    bits = (MISSING if any(grad is None for grad in mine) else 0) | (UNSUPPORTED if sparse else 0)
    status = torch.full((1,), bits, dtype=torch.uint8, device=device)
    return [views_of(lane, grads, device, factor) for lane in lanes], status


def by_name(lanes: Sequence[Lane], flats: Sequence[Tensor]) -> dict[str, Tensor]:
    """The flat vectors of some lanes as tensors by parameter."""
    return {
        name: flat[place].view(shape)
        for lane, flat in zip(lanes, flats, strict=True)
        for (name, place), shape in zip(lane.slices.items(), lane.tensors.shapes, strict=True)
    }


def _is_sparse(grad: Tensor) -> bool:
    return grad.layout != torch.strided


def unsupported_message(grads: Grads) -> str:
    """Why a step is refused."""
    name = next((name for name, grad in grads.items() if grad is not None and _is_sparse(grad)), None)
    which = "another rank has a sparse gradient" if name is None else f"the gradient of {name!r} is sparse"
    return f"{which}, and only dense gradients are compressed; build embeddings with sparse=False"


def check_moments(moments: Mapping[str, Tensor], plan: Plan) -> None:
    """Refuse second moments that belong to no parameter."""
    sizes = {name: n for lane in plan.lanes for name, n in zip(lane.slices, lane.tensors.lengths, strict=True)}
    for name, moment in moments.items():
        if sizes.get(name) != moment.numel():
            raise ValueError(
                f"second moments of {name!r} with {moment.numel()} elements fit no parameter; pass one tensor for "
                "each name of model.named_parameters(), in the parameter's shape"
            )
