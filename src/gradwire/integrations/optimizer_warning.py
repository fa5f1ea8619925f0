"""A warning for specs that starve an adaptive optimizer.

With few entries a step, error feedback sends an entry rarely, and then all at once. An optimizer that divides by the
root of a second moment takes that for one step's gradient: its second moment holds a spike, and its first moment decays
until the next one. With single bits or a low rank every entry is sent, but what it adds up from earlier steps is in the
second moment as well. Training is then far slower than dense training, though nothing fails.
"""

from collections.abc import Mapping
from weakref import WeakKeyDictionary

from torch.optim import Optimizer

from gradwire.engine import Plan
from gradwire.engine.method import starves_adaptive
from gradwire.integrations.entry_point import EntryPoint
from gradwire.integrations.trainer_warnings import warn_user
from gradwire.integrations.wire import Wire

_ADAPTIVE_OPTIONS = {"betas", "alpha", "lr_decay"}  # Adam's kind and Lion, RMSprop, Adagrad
_told: "WeakKeyDictionary[object, set[str]]" = WeakKeyDictionary()  # warnings given so far, by wire or optimizer
_STATES = {"exp_avg_sq", "square_avg", "exp_avg_sq_row", "row_var"}  # also Adadelta and Adafactor
_DENSE = "every entry coarsely in every step, with what earlier steps left out", "that as if it were"


class OptimizerWarning(UserWarning):
    """A spec and an optimizer that do not go together."""


def is_adaptive(optimizer: Optimizer) -> bool:
    """Whether steps are divided by a second moment, or normalized otherwise.

    The options of torch's optimizers show it before the first step; for others, their state shows it afterwards.
    """
    options = [group.keys() for group in optimizer.param_groups]
    by_option = any(_ADAPTIVE_OPTIONS & keys and "t0" not in keys for keys in options)  # ASGD's alpha is another thing
    by_state = any(_STATES & state.keys() for state in optimizer.state.values())
    return by_option or by_state or _is_muon(optimizer)


def _is_muon(optimizer: Optimizer) -> bool:
    return "muon" in type(optimizer).__name__.lower()


def warn_if_starved(optimizer: Optimizer, plan: Plan, wire: Wire, entry: EntryPoint, alone: bool) -> None:
    """Warn of a spec that an adaptive optimizer should not follow, once for all optimizers of a wire.

    Trainers have an optimizer checked when they attach, and it is checked again when it first steps. Python shows a
    warning twice if the filters of warnings change between the two checks.

    Args:
        optimizer: The one that is about to step.
        plan: The lanes of what it steps.
        wire: The wire that compresses.
        entry: What the user called.
        alone: Whether the optimizer steps all that the wire compresses. If not, the remedy must serve others, too.
    """
    why = why_starved(plan, type(optimizer).__name__, wire.setup.written)
    if not why or not is_adaptive(optimizer):
        return
    told = [_told.setdefault(one, set()) for one in (wire, optimizer)]
    about = why_starved(plan, "another one")
    if not any(about in texts for texts in told):
        warn_user(f"{why} {_remedy(optimizer, entry, alone)}", OptimizerWarning)
    for texts in told:
        texts.add(about)


def why_starved(plan: Plan, optimizer: str, written: Mapping[str, str] | None = None) -> str:
    """What a plan would do to an adaptive optimizer of this name; nothing, if it does not starve it.

    Args:
        plan: Of what the optimizer steps.
        optimizer: Its name.
        written: The specs as the user wrote them, by the label of their rule.
    """
    for lane in plan.lanes:
        _, codec, exchange = lane.step_table[-1]
        if starves_adaptive(codec, lane.feedback, exchange):
            made = exchange if exchange.compresses_in_protocol else codec
            given = (written or {}).get(lane.label, "feedback=")  # or what was given beside the spec
            spec = made if given.startswith("feedback=") else given
            sent, like = ("entries rarely", "them as if they were") if codec.selector else _DENSE
            return (
                f"{spec} under {lane.feedback} sends {sent}, and {optimizer} normalizes {like} one step's gradient: "
                "expect a far worse loss than that of dense training."
            )
    return ""


def _remedy(optimizer: Optimizer, entry: EntryPoint, alone: bool) -> str:
    if _is_muon(optimizer):
        rounds = repr("sparseloco(H=1, keep=1.0)")
        return f"Use 'int8', or {entry.local_steps.format(spec=rounds)}"
    return "Use 'int8'" if not alone else f"Use 'int8' or 'int4', or 'onebit_adam': {entry.adamw}"
