"""A warning for specs that starve an adaptive optimizer.

Error feedback sends an entry rarely, and then all at once. An optimizer that divides by the root of a second moment
takes that for one step's gradient: its second moment holds a spike, and its first moment decays until the next one.
Training is then far slower than dense training, though nothing fails.
"""

import warnings

from torch.optim import Optimizer

from gradwire.engine.lane import Lane
from gradwire.engine.plan import Plan

_ADAPTIVE_OPTIONS = {"betas", "alpha", "lr_decay"}  # Adam's kind and Lion, RMSprop, Adagrad
_STATES = {"exp_avg_sq", "square_avg", "exp_avg_sq_row"}
_ONE_BIT = 1.5  # bits a value, with scales


class OptimizerWarning(UserWarning):
    """A spec and an optimizer that do not go together."""


def is_adaptive(optimizer: Optimizer) -> bool:
    """Whether steps are divided by a second moment, or normalized otherwise."""
    group = optimizer.param_groups[0]
    averaged = "t0" in group  # ASGD's alpha is another thing
    by_option = bool(_ADAPTIVE_OPTIONS & group.keys()) and not averaged
    by_state = any(_STATES & state.keys() for state in optimizer.state.values())
    return by_option or by_state or type(optimizer).__name__ == "Muon"


def starving_lane(plan: Plan) -> Lane | None:
    """A lane that sends few entries, single bits or few ranks, and keeps the rest for later steps."""
    return next((lane for lane in plan.lanes if _starves(lane)), None)


def warn_if_starved(optimizer: Optimizer, plan: Plan) -> None:
    """Warn of a spec that an adaptive optimizer should not follow."""
    lane = starving_lane(plan) if is_adaptive(optimizer) else None
    if lane is None:
        return
    codec, exchange = lane.table[-1][1:3]
    spec = exchange if exchange.compresses_in_protocol else codec
    warnings.warn(
        f"{spec} under {lane.feedback} sends entries rarely, and {type(optimizer).__name__} normalizes them as if they "
        "were one step's gradient: expect a far worse loss than that of dense training. Use 'int4' or 'int8', which "
        "lose nothing measurable, or 'onebit_adam' with gradwire.AdamW",
        OptimizerWarning,
        stacklevel=2,
    )


def _starves(lane: Lane) -> bool:
    codec, exchange = lane.table[-1][1:3]
    if not lane.feedback.keeps_error or lane.feedback.needs_denominator or "residual" not in lane.feedback.memories:
        return False
    if exchange.compresses_in_protocol:
        return True
    sparse = codec.selector is not None
    return sparse or 8 * codec.size(lane.units) < _ONE_BIT * lane.units.total
