"""Checkpoint: from the state of an engine to tensors by parameter name, and back into any world.

A saved state is a flat dictionary of plain tensors. ``residual/fc.weight`` is what the memory ``residual`` holds for
the parameter ``fc.weight``, in that parameter's length; ``gradwire/...`` are facts about the run. Where ranks share
hosts, each saves what it serves; ``gradwire/rank`` and ``gradwire/world`` are then of hosts, and the states of a host's
ranks together are what a single rank in its place would have saved.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import product
from typing import TypeAlias

import torch
from torch import Tensor

from gradwire.codecs.stage import StateSpec
from gradwire.engine.hosts import HostEngine
from gradwire.engine.lane import Lane
from gradwire.engine.state import LaneState, spans, zeros
from gradwire.engine.step import Engine
from gradwire.version import WIRE_FORMAT

Saved: TypeAlias = Mapping[str, Tensor]
AnyEngine: TypeAlias = Engine | HostEngine
_CARRIED, _OBSERVED = "owed", "observed"  # what a lane holds in passing, by their names in checkpoints
_SERVED = StateSpec((), "shard")


def save(engine: AnyEngine, spec: str) -> dict[str, Tensor]:
    """One rank's state.

    Raises:
        RuntimeError: A step was to be dropped, and could not be.
    """
    core = engine.core
    core.drops.synchronize()
    numbers = {name: getattr(core, name) for name in ("rank", "seed", "skipped", "step", "world")}
    saved = {f"gradwire/{name}": torch.tensor(n) for name, n in {"format": WIRE_FORMAT, **numbers}.items()}
    saved["gradwire/model"] = _fingerprint(engine)
    saved["gradwire/spec"] = torch.tensor(list(spec.encode()), dtype=torch.uint8)
    for lane, state in zip(core.plan.lanes, core.states, strict=True):
        held = _tensors(state)
        for memory, spec_ in _specs(lane, held, core.world).items():
            for name, span in spans(spec_, lane.tensors, core.rank, core.world).items():
                whole = torch.zeros(span.length)
                whole[span.own] = held[memory][span.live].cpu()
                saved[f"{memory}/{name}"] = whole
    return {**saved, **engine.extra_state} if isinstance(engine, HostEngine) else saved


def _tensors(state: LaneState) -> dict[str, Tensor]:
    """A lane's memories, and what it holds in passing."""
    passing = {_CARRIED: state.carried, _OBSERVED: state.observed}
    return {**state.tensors, **{name: x for name, x in passing.items() if x is not None}}


def _specs(lane: Lane, held: Saved, world: int) -> dict[str, StateSpec]:
    like = StateSpec(lane.tensors.lengths)
    return {**lane.slots(world), **{name: like for name in (_CARRIED, _OBSERVED) if name in held}}


def num_savers(saved: Saved) -> int:
    """How many ranks have saved a state like this one."""
    return int(saved["gradwire/world"]) * int(saved.get("gradwire/beside", 1))


def same_shape(engine: AnyEngine, saved: Saved) -> bool:
    """Whether a state was saved by as many ranks on as many hosts."""
    return _place(saved)[1::2] == (engine.core.world, engine.ranks_per_host)


def _is_own(engine: AnyEngine, saved: Saved) -> bool:
    """Whether a state is of this very rank, in a world of the same shape."""
    return _place(saved) == (engine.core.rank, engine.core.world, engine.local, engine.ranks_per_host)


def _place(saved: Saved) -> tuple[int, ...]:
    absent = {"rank": 0, "world": 1, "local": 0, "beside": 1}
    return tuple(int(saved.get(f"gradwire/{name}", value)) for name, value in absent.items())


def _by_host(engine: AnyEngine, states: Sequence[Saved]) -> list[Saved]:
    """States of ranks that share hosts as states of hosts; a rank's own, and those of single ranks, as they are.

    Raises:
        ValueError: Some of a host's ranks are missing.
    """
    if all(int(state.get("gradwire/beside", 1)) == 1 for state in states):
        return list(states)
    if len(states) == 1 and _is_own(engine, states[0]):
        return list(states)
    _, world, _, per_host = _place(states[0])
    by_place = {_place(state)[::2]: state for state in states}
    places = list(product(range(world), range(per_host)))
    if sorted(by_place) != places or len(states) != len(places):
        raise ValueError(
            f"the states are of ranks {sorted(by_place)} as (host, rank on it), of {world} hosts with {per_host} each; "
            f"load each rank's own state or, to change hosts or ranks, the states of all {len(places)} ranks"
        )
    return [_joined([by_place[rank, local] for local in range(per_host)]) for rank in range(world)]


def _joined(host: Sequence[Saved]) -> Saved:
    """What the ranks of one host hold together."""
    of_rank = ("gradwire/local", "gradwire/beside")
    return {key: x for state in host for key, x in state.items() if key not in of_rank}


def load(engine: AnyEngine, states: Sequence[Saved]) -> None:
    """Take over a rank's own state, or reshard the states of all ranks of another world; `check` them first."""
    core = engine.core
    states = _by_host(engine, states)
    mine = states
    if int(states[0]["gradwire/world"]) == core.world:
        mine = [state for state in states if int(state["gradwire/rank"]) == core.rank]
    for lane, state in zip(core.plan.lanes, core.states, strict=True):
        _load_lane(core, lane, state, mine, states)
    if isinstance(engine, HostEngine):
        engine.load_extra_state(mine[0])
    core.step = int(states[0]["gradwire/step"])
    core.seed = int(states[0]["gradwire/seed"])
    core.drops.restart(int(states[0]["gradwire/skipped"]))


def _load_lane(core: Engine, lane: Lane, state: LaneState, mine: Sequence[Saved], states: Sequence[Saved]) -> None:
    found = _buffers(core, lane, mine, states)
    state.carried, state.observed = found.pop(_CARRIED, None), found.pop(_OBSERVED, None)
    if core.rollback:
        state.replace(found)
        return
    for name, x in state.tensors.items():  # captured steps would keep the old memories as well as the new
        x.copy_(found[name])


def _buffers(core: Engine, lane: Lane, mine: Sequence[Saved], states: Sequence[Saved]) -> dict[str, Tensor]:
    """One lane's memories. The error of a server may lie with any rank, all others with their owner."""
    places = {key.partition("/")[::2] for state in states for key in state}
    found = {memory: torch.zeros(0) for memory, name in places if name in lane.slices}
    specs = _specs(lane, found, core.world)
    unserved = "served" in found and "served" not in specs
    if unserved:  # this world's exchange has no servers, so their error is carried by all
        specs[_CARRIED] = StateSpec(lane.tensors.lengths)
    buffers = zeros(specs, lane.tensors, core.rank, core.world, core.device)
    for memory, spec in specs.items():
        for name, span in spans(spec, lane.tensors, core.rank, core.world).items():
            held = states if spec.reshard == "shard" else mine
            whole = _merge([state.get(f"{memory}/{name}") for state in held], spec, span.length)
            if memory == _CARRIED and unserved:
                whole = whole + _merge([state.get(f"served/{name}") for state in states], _SERVED, span.length)
            buffers[memory][span.live] = whole[span.own].to(core.device)
    return buffers


def _merge(copies: Sequence[Tensor | None], spec: StateSpec, n: int) -> Tensor:
    """One memory of one parameter, of all ranks' copies; a rank without one holds zeros."""
    held = [torch.zeros(n) if copy is None else copy for copy in copies]
    if len(held) == 1 or spec.reshard == "same":
        return held[0]
    total = torch.stack([copy.double() for copy in held]).sum(0)
    return (total if spec.reshard == "shard" else total / len(held)).float()


def _fingerprint(engine: AnyEngine) -> Tensor:
    shapes = [
        shape for lane in engine.whole.lanes for shape in zip(lane.tensors.names, lane.tensors.shapes, strict=True)
    ]
    digest = hashlib.sha256(json.dumps(sorted(shapes)).encode()).digest()
    return torch.tensor(list(digest[:8]), dtype=torch.uint8)


def check(engine: AnyEngine, states: Sequence[Saved], spec: str) -> None:
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
    hosts = _by_host(engine, states)
    if len(states) > 1 or not _is_own(engine, states[0]):
        _check_ranks(engine.core, hosts)
    steps = sorted({int(state["gradwire/step"]) for state in states})
    if len(steps) > 1:
        raise ValueError(f"the states were saved at different steps, {steps}; pass those of one step")
    _check_model(engine, hosts[0])


def _check_ranks(core: Engine, states: Sequence[Saved]) -> None:
    world, ranks = int(states[0]["gradwire/world"]), sorted(int(state["gradwire/rank"]) for state in states)
    if ranks != list(range(world)):
        raise ValueError(
            f"the state is of ranks {ranks} of a world of {world}, and this is rank {core.rank} of "
            f"{core.world}; load each rank's own state or, to change the world, the states of all {world} ranks"
        )


def _check_model(engine: AnyEngine, state: Saved) -> None:
    lone = int(state["gradwire/world"]) == 1
    for lane in engine.core.plan.lanes:
        for memory, spec in lane.slots(engine.core.world).items():
            for name, n in zip(lane.tensors.names, spec.lengths, strict=True):
                saved = state.get(f"{memory}/{name}")
                if saved is None and (spec.reshard == "shard" or lone):
                    continue  # the world that saved it had no servers; or it was one host, which compresses nothing
                if saved is None or saved.numel() != n:
                    found = "nothing" if saved is None else f"{saved.numel()} elements"
                    raise ValueError(
                        f"the state holds {found} of {memory} for {name!r}, where {n} elements are needed; "
                        "is it a checkpoint of another model?"
                    )
    if not torch.equal(state["gradwire/model"], _fingerprint(engine)):
        raise ValueError(
            "the state was saved for another model: its trainable parameters differ in name, number or shape; "
            "build that model, or start without the state"
        )
