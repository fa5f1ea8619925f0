"""Memory: from slots to buffers, from buffers to a checkpoint keyed by parameter name, and back into any world.

A saved state is a flat dictionary of plain tensors. ``residual/fc.weight`` is what the memory ``residual`` holds for
the parameter ``fc.weight``, in that parameter's length; ``gradwire/...`` are facts about the run. Where ranks share
hosts, each saves what it serves; ``gradwire/rank`` and ``gradwire/world`` are then of hosts, and the states of a host's
ranks together are what a single rank in its place would have saved.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from gradwire.codecs.stage import StateSpec
from gradwire.engine.lane import OBSERVED, OWED, Lane
from gradwire.exchanges.two_way import shard
from gradwire.version import WIRE_FORMAT

if TYPE_CHECKING:
    from gradwire.engine.session import Session

State = Mapping[str, Tensor]


class Span(NamedTuple):
    """Where a parameter's share of a memory lies: in the live buffer, and within the parameter's own saved vector."""

    live: slice
    own: slice
    length: int


def spans(slot: StateSpec, lane: Lane, rank: int, world: int) -> dict[str, Span]:
    """The shares of all parameters of a lane in one memory."""
    start, stop = shard(sum(slot.lengths), world, rank) if slot.reshard == "shard" else (0, sum(slot.lengths))
    found, at = {}, 0
    for name, n in zip(lane.tensors.names, slot.lengths, strict=True):
        lo, hi = max(at, start), max(min(at + n, stop), max(at, start))
        found[name] = Span(slice(lo - start, hi - start), slice(lo - at, hi - at), n)
        at += n
    return found


def fresh(slots: Mapping[str, StateSpec], lane: Lane, rank: int, world: int, device: torch.device) -> dict[str, Tensor]:
    """Buffers of zeros, as large as this rank needs them."""
    buffers = {}
    for name, slot in slots.items():
        sizes = [span.live.stop - span.live.start for span in spans(slot, lane, rank, world).values()]
        buffers[name] = torch.zeros(sum(sizes), device=device)
    return buffers


def slots_of(lane: Lane, memory: Mapping[str, Tensor], world: int) -> dict[str, StateSpec]:
    """The lane's slots, and those of debts and moments that it happens to hold."""
    like = StateSpec(lane.tensors.lengths)
    passing = {name: like for name in (OWED, OBSERVED) if name in memory}
    return {**lane.slots(world), **passing}


def save(session: "Session", spec: str) -> dict[str, Tensor]:
    """One rank's state.

    Raises:
        RuntimeError: A step has spoiled the memories, and nobody has noticed yet.
    """
    session.look_back()
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
    return {**state, **session.facts}


def seats(state: State) -> int:
    """How many ranks have saved a state like this one."""
    return int(state["gradwire/world"]) * int(state.get("gradwire/beside", 1))


def same_shape(session: "Session", state: State) -> bool:
    """Whether a state was saved by as many ranks on as many hosts."""
    return _seat(state)[1::2] == (session.world, session.beside)


def is_own(session: "Session", state: State) -> bool:
    """Whether a state is of this very rank, in a world of the same shape."""
    return _seat(state) == (session.rank, session.world, session.local, session.beside)


def _seat(state: State) -> tuple[int, ...]:
    absent = {"rank": 0, "world": 1, "local": 0, "beside": 1}
    return tuple(int(state.get(f"gradwire/{name}", value)) for name, value in absent.items())


def by_host(session: "Session", states: Sequence[State]) -> list[State]:
    """States of ranks that share hosts as states of hosts; a rank's own, and those of single ranks, as they are.

    Raises:
        ValueError: Some of a host's ranks are missing.
    """
    if all(int(state.get("gradwire/beside", 1)) == 1 for state in states):
        return list(states)
    if len(states) == 1 and is_own(session, states[0]):
        return list(states)
    hosts: dict[int, dict[int, State]] = {}
    for state in states:
        rank, _, local, _ = _seat(state)
        hosts.setdefault(rank, {})[local] = state
    _, world, _, beside = _seat(states[0])
    if len(states) != world * beside or any(len(host) != beside for host in hosts.values()):
        found = sorted(_seat(state)[::2] for state in states)
        raise ValueError(
            f"the states are of ranks {found} as (host, rank on it), where {world} hosts of {beside} saved theirs; "
            f"load each rank's own state or, to change hosts or ranks, the states of all {world * beside} ranks"
        )
    return [_joined(hosts[rank]) for rank in sorted(hosts)]


def _joined(host: Mapping[int, State]) -> State:
    """What the ranks of one host hold together."""
    whole = {key: x for local in sorted(host) for key, x in host[local].items()}
    return {key: x for key, x in whole.items() if key not in ("gradwire/local", "gradwire/beside")}


def load(session: "Session", states: Sequence[State]) -> None:
    """Take over a rank's own state, or reshard the states of all ranks of another world; `check` them first."""
    states = by_host(session, states)
    mine = states
    if int(states[0]["gradwire/world"]) == session.world:
        mine = [state for state in states if int(state["gradwire/rank"]) == session.rank]
    for i, lane in enumerate(session.plan.lanes):
        found = _buffers(session, lane, mine, states)
        session.memories[i] = found if session.rollback else _onto(session.memories[i], found)
    session.recall(mine[0])
    session.step = int(states[0]["gradwire/step"])
    session.skipped = int(states[0]["gradwire/skipped"])
    session.begin_anew()
    session.seed = int(states[0]["gradwire/seed"])


def _onto(held: State, found: State) -> dict[str, Tensor]:
    """Memories written over those that are changed in place: recorded launches would keep the old beside the new."""
    fits = {name for name, x in found.items() if name in held and held[name].shape == x.shape}
    return {name: held[name].copy_(x) if name in fits else x for name, x in found.items()}


def _buffers(session: "Session", lane: Lane, mine: Sequence[State], states: Sequence[State]) -> dict[str, Tensor]:
    """One lane's memories. A server's debts may lie with anybody, all others with their owner."""
    places = {key.partition("/")[::2] for state in states for key in state}
    found = {memory: torch.zeros(0) for memory, name in places if name in lane.slices}
    slots = slots_of(lane, found, session.world)
    homeless = "served" in found and "served" not in slots
    if homeless:  # this world's exchange has no servers, so their debt is everybody's
        slots[OWED] = StateSpec(lane.tensors.lengths)
    buffers = fresh(slots, lane, session.rank, session.world, session.device)
    for slot_name, slot in slots.items():
        for name, span in spans(slot, lane, session.rank, session.world).items():
            held = states if slot.reshard == "shard" else mine
            whole = _merge([state.get(f"{slot_name}/{name}") for state in held], slot, span.length)
            if slot_name == OWED and homeless:
                whole = whole + _merge([state.get(f"served/{name}") for state in states], _SERVED, span.length)
            buffers[slot_name][span.live] = whole[span.own].to(session.device)
    return buffers


_SERVED = StateSpec((), "shard")


def _merge(copies: Sequence[Tensor | None], slot: StateSpec, n: int) -> Tensor:
    """One memory of one parameter, of all ranks' copies; who has none holds zeros."""
    held = [torch.zeros(n) if copy is None else copy for copy in copies]
    if len(held) == 1 or slot.reshard == "same":
        return held[0]
    total = torch.stack([copy.double() for copy in held]).sum(0)
    return (total if slot.reshard == "shard" else total / len(held)).float()


def _fingerprint(session: "Session") -> Tensor:
    shapes = [
        shape for lane in session.whole.lanes for shape in zip(lane.tensors.names, lane.tensors.shapes, strict=True)
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
    hosts = by_host(session, states)
    if len(states) > 1 or not is_own(session, states[0]):
        _check_ranks(session, hosts)
    steps = sorted({int(state["gradwire/step"]) for state in states})
    if len(steps) > 1:
        raise ValueError(f"the states were saved at different steps, {steps}; pass those of one step")
    _check_model(session, hosts[0])


def _check_ranks(session: "Session", states: Sequence[State]) -> None:
    world, ranks = int(states[0]["gradwire/world"]), sorted(int(state["gradwire/rank"]) for state in states)
    if ranks != list(range(world)):
        raise ValueError(
            f"the state is of ranks {ranks} of a world of {world}, and this is rank {session.rank} of "
            f"{session.world}; load each rank's own state or, to change the world, the states of all {world} ranks"
        )


def _check_model(session: "Session", state: State) -> None:
    lone = int(state["gradwire/world"]) == 1
    for lane in session.plan.lanes:
        for slot_name, slot in lane.slots(session.world).items():
            for name, n in zip(lane.tensors.names, slot.lengths, strict=True):
                saved = state.get(f"{slot_name}/{name}")
                if saved is None and (slot.reshard == "shard" or lone):
                    continue  # the world that saved it had no servers; or it was one host, which compresses nothing
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
