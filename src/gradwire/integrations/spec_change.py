"""Change: what a wire takes along when it goes on in another way."""

import torch

from gradwire.core.spec import parse
from gradwire.engine import memory
from gradwire.engine.lane import OWED
from gradwire.engine.method import Method, Spec
from gradwire.engine.session import Session
from gradwire.feedback import Feedback


def going_on(spec: Spec, feedback: str | Feedback | None, current: Feedback | None) -> str | Feedback | None:
    """The feedback to take: a codec alone goes on under the one that keeps debts now."""
    made = parse(spec) if isinstance(spec, str) else spec
    if feedback is not None or isinstance(made, Method) or current is None or not current.indebted:
        return feedback
    return current


def inherit(old: Session, new: Session) -> None:
    """Carry memories over by parameter name; a debt that has no memory of its own there is owed at the next step."""
    new.step, new.skipped = old.step, old.skipped
    new.said, new.meant, new.spent = old.said, old.meant, old.spent
    saved = memory.save(old, "")
    new.recall(saved)
    owed = {}
    for lane, held in zip(old.plan.lanes, old.memories, strict=True):
        debt = lane.debt(held, old.rank, old.world).to(old.device)
        owed.update({name: debt[place] for name, place in lane.slices.items()})
    for lane, held in zip(new.plan.lanes, new.memories, strict=True):
        for slot_name, slot in lane.slots(new.world).items():
            for name, span in memory.spans(slot, lane, new.rank, new.world).items():
                whole = saved.get(f"{slot_name}/{name}")
                if whole is not None and whole.numel() == span.length:
                    held[slot_name][span.live] = whole[span.own].to(new.device)
        held_already = lane.debt(held, new.rank, new.world).to(new.device)
        left = torch.cat([owed[name] for name in lane.tensors.names]) - held_already
        if bool((left != 0).any()):
            held[OWED] = left
