"""Optim: from a recipe's [optimizer] to an optimizer, and what happens to a gradient just before it."""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from gradwire.integrations import SGD
from gradwire_lab.train.call_with_options import nearest
from gradwire_lab.train.compression import corrects_momentum
from gradwire_lab.train.models import Regime, stages
from gradwire_lab.train.recipe import Recipe, read

REGIME = dict.fromkeys(("optimizer", "lr", "momentum", "nesterov", "weight_decay", "eps"))  # what a regime may set


def apply_regime(recipe: Recipe, regime: Regime | None) -> Recipe:
    """The recipe, its optimizer being the one that a model's regime begins with.

    Raises:
        ValueError: The regime sets what no optimizer has, or changes what stays as it is for a whole run.
    """
    if regime is None:
        return recipe
    first, *later = told = stages(regime, math.ceil(recipe.train.epochs))
    for key in (key for settings in told for key in settings):
        if key not in REGIME:
            raise ValueError(f"the model's regime sets {key!r}, which is no setting; {nearest(key, REGIME)}")
    obeyed = {"name" if key == "optimizer" else key: value for key, value in first.items()}
    if "name" in obeyed:
        obeyed["name"] = str(obeyed["name"]).lower()
    tables = recipe.model_dump()
    made = read({**tables, "optimizer": {**tables["optimizer"], **obeyed}})
    for key in _lasting(made):
        if any(settings.get(key, first.get(key)) != first.get(key) for settings in later):
            raise ValueError(f"the model's regime changes {key} while this recipe trains, which cannot be; set it once")
    return made


def _lasting(recipe: Recipe) -> tuple[str, ...]:
    """What is decided when a run begins."""
    compressed = ("momentum",) if corrects_momentum(recipe) else ()  # then it is the compressor's
    gossiping = ("weight_decay",) if recipe.gossip.method else ()
    return ("optimizer", "nesterov", *compressed, *gossiping)


def optimizer_of(recipe: Recipe, model: nn.Module) -> torch.optim.Optimizer:
    """SGD or AdamW; where momentum is corrected before compression, the SGD that leaves it at that."""
    plan = recipe.optimizer
    groups = decay_groups(model, plan.weight_decay, plan.decay_norms)
    if plan.name == "adamw":
        if corrects_momentum(recipe):
            raise ValueError(
                "AdamW has momentum of its own, and this feedback applies momentum too; use feedback = 'residual'"
            )
        return torch.optim.AdamW(groups, lr=plan.lr, betas=(plan.beta1, plan.beta2), eps=plan.eps)
    if corrects_momentum(recipe):
        return SGD(groups, lr=plan.lr, momentum=plan.momentum, nesterov=plan.nesterov)
    return torch.optim.SGD(groups, lr=plan.lr, momentum=plan.momentum, nesterov=plan.nesterov and plan.momentum > 0)


def decay_groups(model: nn.Module, weight_decay: float, decay_norms: bool) -> list[dict[str, object]]:
    """One group of all that decays, and if told so, one of 1-D tensors (norms, biases), which do not."""
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
def clip_(gradients: Iterable[Tensor | None], longest: float | Tensor) -> Tensor:
    """Scale gradients down, so that together they are no longer than that, by what is returned; nothing waits."""
    there = [g for g in gradients if g is not None]
    norm = torch.nn.utils.get_total_norm(there)
    factor = (longest / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(there, factor)
    return factor
