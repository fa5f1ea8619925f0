"""Spec change: what state a wire keeps when its spec changes."""

import torch

from gradwire.core.spec import parse
from gradwire.engine import checkpoint
from gradwire.engine.method import Method, Spec
from gradwire.engine.sharded import AnyEngine
from gradwire.engine.state import spans
from gradwire.engine.step import Engine
from gradwire.feedback import Feedback


def feedback_after(spec: Spec, feedback: str | Feedback | None, current: Feedback | None) -> str | Feedback | None:
    """The feedback to take: a codec alone keeps the current one, if that keeps errors."""
    made = parse(spec) if isinstance(spec, str) else spec
    if feedback is not None or isinstance(made, Method) or current is None or not current.keeps_error:
        return feedback
    return current


def migrate_state(old: AnyEngine, new: AnyEngine) -> None:
    """Carry state over by parameter name; an error that has no memory of its own is carried into the next step."""
    before, after = old.unwrapped, new.unwrapped
    after.step, after.accounting = before.step, before.accounting
    after.skipped_steps.restart(before.skipped)
    saved = checkpoint.save(old, "")
    if not isinstance(new, Engine):
        new.load_extra_state(saved)
    debts = {}
    divided = {name: lane.feedback.divides for lane in before.plan.lanes for name in lane.tensors.names}
    for lane, state in zip(before.plan.lanes, before.states, strict=True):
        debt = lane.pending_error(state, before.rank, before.world).to(before.device)
        debts.update({name: debt[place] for name, place in lane.slices.items()})
    for lane, state in zip(after.plan.lanes, after.states, strict=True):
        for memory, spec in lane.state_specs(after.world).items():
            for name, span in spans(spec, lane.tensors, after.rank, after.world).items():
                whole = saved.get(f"{memory}/{name}")
                same_units = memory == "denominator" or divided[name] == lane.feedback.divides
                if whole is not None and whole.numel() == span.length and same_units:
                    state.tensors[memory][span.live] = whole[span.own].to(after.device)
        in_memory = lane.pending_error(state, after.rank, after.world).to(after.device)
        left = torch.cat([debts[name] for name in lane.tensors.names]) - in_memory
        if bool((left != 0).any()):
            state.carried_error = left
