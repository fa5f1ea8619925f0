"""Optim: from a recipe's [optimizer] to an optimizer, and what happens to a gradient just before it."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.optim import SGD, AdamW
from gradwire_lab.train.call_with_options import nearest
from gradwire_lab.train.compression import corrects_momentum, needs_adamw
from gradwire_lab.train.models.regime import Regime, stages
from gradwire_lab.train.recipe import OptimizerTable, Recipe, read

REGIME = ("optimizer", "lr", "momentum", "nesterov", "weight_decay", "eps")  # what a regime may set


def apply_regime(recipe: Recipe, regime: Regime | None) -> Recipe:
    """The recipe, its optimizer being the one that a model's regime begins with.

    Raises:
        ValueError: The regime sets what no optimizer has, or changes what stays as it is for a whole run.
    """
    if regime is None:
        return recipe
    first, *later = every = stages(regime, math.ceil(recipe.train.epochs))
    for key in (key for settings in every for key in settings):
        if key not in REGIME:
            raise ValueError(f"the model's regime sets {key!r}, which is not a setting; {nearest(key, REGIME)}")
    changes = {"name" if key == "optimizer" else key: value for key, value in first.items()}
    if "name" in changes:
        changes["name"] = str(changes["name"]).lower()
    tables = recipe.model_dump()
    changed = read({**tables, "optimizer": {**tables["optimizer"], **changes}})
    for key in _lasting(changed):
        if any(settings.get(key, first.get(key)) != first.get(key) for settings in later):
            raise ValueError(
                f"the model's regime changes {key} while this recipe trains, which is not supported; set it once"
            )
    return changed


def _lasting(recipe: Recipe) -> tuple[str, ...]:
    """What is decided when a run begins."""
    compressed = ("momentum",) if corrects_momentum(recipe) else ()  # then it is the compressor's
    gossiping = ("weight_decay",) if recipe.own_models else ()
    return ("optimizer", "nesterov", *compressed, *gossiping)


def optimizer_of(recipe: Recipe, model: nn.Module) -> torch.optim.Optimizer:
    """SGD or AdamW; where momentum is compressed, the SGD that leaves it at that, or the AdamW that shares its own."""
    plan = recipe.optimizer
    groups = decay_groups(model, plan.weight_decay, plan.decay_norms)
    if corrects_momentum(recipe):
        return SGD(groups, lr=plan.lr, momentum=plan.momentum, nesterov=plan.nesterov)
    if needs_adamw(recipe):
        return AdamW(groups, lr=plan.lr, betas=(plan.beta1, plan.beta2), eps=plan.eps)
    return plain_optimizer(plan, groups)


def plain_optimizer(plan: OptimizerTable, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """SGD or AdamW of torch."""
    if plan.name == "adamw":
        return torch.optim.AdamW(groups, lr=plan.lr, betas=(plan.beta1, plan.beta2), eps=plan.eps)
    return torch.optim.SGD(groups, lr=plan.lr, momentum=plan.momentum, nesterov=plan.nesterov and plan.momentum > 0)


def decay_groups(model: nn.Module, weight_decay: float, decay_norms: bool) -> list[dict[str, Any]]:
    """One group of all that decays, and unless ``decay_norms``, one of 1-D tensors (norms, biases), which do not."""
    wanted = [p for p in model.parameters() if p.requires_grad]
    if decay_norms:
        return [{"params": wanted, "weight_decay": weight_decay}]
    return [
        {"params": [p for p in wanted if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in wanted if p.dim() <= 1], "weight_decay": 0.0},
    ]


def set_hyperparameters(optimizer: torch.optim.Optimizer, settings: Mapping[str, float]) -> None:
    """Set the rate, and whatever else a regime sets; the second group, if there is one, has no decay."""
    for i, group in enumerate(optimizer.param_groups):
        for name, value in settings.items():
            if name in group and not (name == "weight_decay" and i > 0):
                group[name] = value


@torch.no_grad()
def clip_(gradients: Iterable[Tensor | None], max_norm: float | Tensor) -> Tensor:
    """Scale gradients down to a common norm, by the factor that is returned; nothing waits for the device."""
    present = [g for g in gradients if g is not None]
    norm = torch.nn.utils.get_total_norm(present)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(present, factor)
    return factor
