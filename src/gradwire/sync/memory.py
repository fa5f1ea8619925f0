"""Memory: from slots to buffers, from buffers to a checkpoint keyed by parameter name, and back into any world.

A saved state is a flat dictionary of plain tensors. ``residual/fc.weight`` is what the memory ``residual`` holds for
the parameter ``fc.weight``, in that parameter's length; ``gradwire/...`` are facts about the run.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from gradwire.codecs.stage import Slot
from gradwire.exchanges.two_way import shard
from gradwire.sync.lane import OBSERVED, OWED, Lane
from gradwire.version import WIRE_FORMAT

if TYPE_CHECKING:
    from gradwire.sync.session import Session

State = Mapping[str, Tensor]


class Span(NamedTuple):
    """Where a parameter's share of a memory lies: in the live buffer, and within the parameter's own saved vector."""

    live: slice
    own: slice
    length: int


def spans(slot: Slot, lane: Lane, rank: int, world: int) -> dict[str, Span]:
    """The shares of all parameters of a lane in one memory."""
    start, stop = shard(sum(slot.lengths), world, rank) if slot.reshard == "shard" else (0, sum(slot.lengths))
    found, at = {}, 0
    for name, n in zip(lane.tensors.names, slot.lengths, strict=True):
        lo, hi = max(at, start), max(min(at + n, stop), max(at, start))
        found[name] = Span(slice(lo - start, hi - start), slice(lo - at, hi - at), n)
        at += n
    return found


def fresh(slots: Mapping[str, Slot], lane: Lane, rank: int, world: int, device: torch.device) -> dict[str, Tensor]:
    """Buffers of zeros, as large as this rank needs them."""
    buffers = {}
    for name, slot in slots.items():
        sizes = [span.live.stop - span.live.start for span in spans(slot, lane, rank, world).values()]
        buffers[name] = torch.zeros(sum(sizes), device=device)
    return buffers


def slots_of(lane: Lane, memory: Mapping[str, Tensor], world: int) -> dict[str, Slot]:
    """The lane's slots, and those of debts and moments that it happens to hold."""
    like = Slot(lane.tensors.lengths)
    passing = {name: like for name in (OWED, OBSERVED) if name in memory}
    return {**lane.slots(world), **passing}


def save(session: "Session", spec: str) -> dict[str, Tensor]:
    """One rank's state."""
    state = {
        "gradwire/format": torch.tensor(WIRE_FORMAT),
        "gradwire/model": _fingerprint(session),
        "gradwire/rank": torch.tensor(session.rank),
        "gradwire/seed": torch.tensor(session.seed),
        "gradwire/skipped": torch.tensor(session.skipped),
        "gradwire/spec": torch.tensor(list(spec.encode()), dtype=torch.uint8),
        "gradwire/step": torch.tensor(session.step),
        "gradwire/world": torch.tensor(session.world),
    }
    for lane, memory in zip(session.plan.lanes, session.memories, strict=True):
        for slot_name, slot in slots_of(lane, memory, session.world).items():
            for name, span in spans(slot, lane, session.rank, session.world).items():
                whole = torch.zeros(span.length)
                whole[span.own] = memory[slot_name][span.live].cpu()
                state[f"{slot_name}/{name}"] = whole
    return state


def load(session: "Session", states: Sequence[State]) -> None:
    """Take over a rank's own state, or reshard the states of all ranks of another world; `check` them first."""
    if int(states[0]["gradwire/world"]) == session.world:
        states = [state for state in states if int(state["gradwire/rank"]) == session.rank]
    for i, lane in enumerate(session.plan.lanes):
        session.memories[i] = _buffers(session, lane, states)
    session.step = int(states[0]["gradwire/step"])
    session.skipped = int(states[0]["gradwire/skipped"])
    session.seed = int(states[0]["gradwire/seed"])


def _buffers(session: "Session", lane: Lane, states: Sequence[State]) -> dict[str, Tensor]:
    found = {key.partition("/")[0]: torch.zeros(0) for state in states for key in state}
    slots = slots_of(lane, found, session.world)
    homeless = "served" in found and "served" not in slots
    if homeless:  # this world's exchange has no servers, so their debt is everybody's
        slots[OWED] = Slot(lane.tensors.lengths)
    buffers = fresh(slots, lane, session.rank, session.world, session.device)
    for slot_name, slot in slots.items():
        for name, span in spans(slot, lane, session.rank, session.world).items():
            whole = _merge([state.get(f"{slot_name}/{name}") for state in states], slot, span.length)
            if slot_name == OWED and homeless:
                whole = whole + _merge([state.get(f"served/{name}") for state in states], _SERVED, span.length)
            buffers[slot_name][span.live] = whole[span.own].to(session.device)
    return buffers


_SERVED = Slot((), "shard")


def _merge(copies: Sequence[Tensor | None], slot: Slot, n: int) -> Tensor:
    """One memory of one parameter, of all ranks' copies; who has none holds zeros."""
    held = [torch.zeros(n) if copy is None else copy for copy in copies]
    if len(held) == 1 or slot.reshard == "same":
        return held[0]
    total = torch.stack([copy.double() for copy in held]).sum(0)
    return (total if slot.reshard == "shard" else total / len(held)).float()


def _fingerprint(session: "Session") -> Tensor:
    shapes = [
        shape for lane in session.plan.lanes for shape in zip(lane.tensors.names, lane.tensors.shapes, strict=True)
    ]
    digest = hashlib.sha256(json.dumps(sorted(shapes)).encode()).digest()
    return torch.tensor(list(digest[:8]), dtype=torch.uint8)


def check(session: "Session", states: Sequence[State], spec: str) -> None:
    """Refuse what cannot be loaded.

    Raises:
        ValueError: The state belongs to another spec or model, or is not all that is needed.
    """
    if not states or any("gradwire/spec" not in state for state in states):
        raise ValueError("this is no gradwire state: it lacks gradwire/spec; pass what state_dict() returned")
    if int(states[0]["gradwire/format"]) != WIRE_FORMAT:
        raise ValueError(
            f"the state has format {int(states[0]['gradwire/format'])}, but this gradwire reads {WIRE_FORMAT}; "
            "install the gradwire that saved it"
        )
    saved = bytes(states[0]["gradwire/spec"].tolist()).decode()
    if saved != spec:
        raise ValueError(
            f"the state was saved under the spec [{saved}], but this run has [{spec}]; attach with the saved spec, "
            "load, and then change it with wire.set(...)"
        )
    _check_ranks(session, states)
    _check_model(session, states[0])


def _check_ranks(session: "Session", states: Sequence[State]) -> None:
    world, ranks = int(states[0]["gradwire/world"]), sorted(int(state["gradwire/rank"]) for state in states)
    own = world == session.world and ranks.count(session.rank) == 1
    if not own and ranks != list(range(world)):
        raise ValueError(
            f"the state is of ranks {ranks} of a world of {world}, and this is rank {session.rank} of "
            f"{session.world}; load each rank's own state or, to change the world, the states of all {world} ranks"
        )
    steps = sorted({int(state["gradwire/step"]) for state in states})
    if len(steps) > 1:
        raise ValueError(f"the states were saved at different steps, {steps}; pass those of one step")


def _check_model(session: "Session", state: State) -> None:
    for lane in session.plan.lanes:
        for slot_name, slot in lane.slots(session.world).items():
            for name, n in zip(lane.tensors.names, slot.lengths, strict=True):
                saved = state.get(f"{slot_name}/{name}")
                if saved is None and slot.reshard == "shard":
                    continue  # the world that saved it had no servers
                if saved is None or saved.numel() != n:
                    found = "nothing" if saved is None else f"{saved.numel()} elements"
                    raise ValueError(
                        f"the state holds {found} of {slot_name} for {name!r}, where {n} elements are needed; "
                        "is it a checkpoint of another model?"
                    )
    if not torch.equal(state["gradwire/model"], _fingerprint(session)):
        raise ValueError(
            "the state was saved for another model: its trainable parameters differ in name, number or shape; "
            "build that model, or start without the state"
        )
