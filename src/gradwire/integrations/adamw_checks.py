"""Checks that a method such as ``onebit_adam`` goes with the optimizer that it was given."""

from collections.abc import Mapping

from torch import nn
from torch.optim import Optimizer

from gradwire.engine import Lane, Plan
from gradwire.integrations.entry_point import EntryPoint
from gradwire.optim import AdamW


def check_optimizer(
    optimizer: Optimizer | None,
    parameters: Mapping[str, nn.Parameter],
    entry: EntryPoint,
    plan: Plan,
    written: Mapping[str, str],
) -> None:
    """Refuse a plan that compresses momentum where no `gradwire.AdamW` with the same betas applies it.

    Args:
        optimizer: The one that steps the parameters, if it is known.
        parameters: By name.
        entry: What the user called.
        plan: The plan of the specs.
        written: The specs as the user wrote them, by the label of their rule.
    """
    for lane in plan.lanes:
        if lane.feedback.needs_denominator:
            if not isinstance(optimizer, AdamW):
                raise ValueError(
                    f"{spec_of(lane, written)} compresses the momentum of gradwire.AdamW, but {_described(optimizer)}; "
                    f"{entry.adamw}"
                )
            _check_lane(optimizer, parameters, lane, spec_of(lane, written))


def spec_of(lane: Lane, written: Mapping[str, str]) -> str:
    """What the user wrote for a lane."""
    return written.get(lane.label, str(lane.feedback))


def _described(optimizer: Optimizer | None) -> str:
    if optimizer is None:
        return "no optimizer was given"
    kind = type(optimizer)  # whose name alone may be AdamW, too
    return f"{kind.__module__.removesuffix(f'.{kind.__name__.lower()}')}.{kind.__name__} was given"


def _check_lane(optimizer: AdamW, parameters: Mapping[str, nn.Parameter], lane: Lane, spec: str) -> None:
    beta = getattr(lane.feedback, "beta", None)
    betas = {id(p): group["betas"] for group in optimizer.param_groups for p in group["params"]}
    for name in lane.tensors.names:
        found = betas.get(id(parameters[name]))
        if found is None:
            raise ValueError(
                f"{spec} compresses the momentum of one gradwire.AdamW, and the one that was given does not step "
                f"{name!r}; give it all parameters, or others a rule, gradwire.Rule('int4', name={name!r})"
            )
        if float(found[0]) != beta:
            raise ValueError(
                f"{spec} has beta={beta}, but AdamW has betas={found} for {name!r}; give both the same, and groups "
                f"with other betas a rule of their own, gradwire.Rule('onebit_adam(start={lane.gradient_steps}, "
                f"beta={found[0]})', name={name!r}); a scheduler must not change them, as OneCycleLR does without "
                "cycle_momentum=False"
            )
    if any(exchange.delays for _, _, exchange in lane.step_table):
        raise ValueError(
            f"{spec} needs the momentum of the same step, as {lane.feedback} does; use an exchange that is not delayed"
        )
