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
from gradwire.engine.lane import Lane
from gradwire.engine.shards import AnyEngine, ShardEngine
from gradwire.engine.state import LaneState, spans, zeros
from gradwire.engine.step import Engine
from gradwire.exchanges.shards import SERVER_ERROR
from gradwire.feedback.feedback import divisor
from gradwire.version import WIRE_FORMAT

Saved: TypeAlias = Mapping[str, Tensor]
_CARRIED, _OBSERVED = "owed", "observed"  # what a lane holds in passing, by their names in checkpoints
_BY_SHARD = StateSpec((), "shard")


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
                vector = torch.zeros(span.length)
                vector[span.own] = held[memory][span.live].cpu()
                saved[f"{memory}/{name}"] = vector
    return saved if isinstance(engine, Engine) else {**saved, **engine.extra_state}


def _tensors(state: LaneState) -> dict[str, Tensor]:
    """A lane's memories, and what it holds in passing."""
    passing = {_CARRIED: state.carried, _OBSERVED: state.observed}
    return {**state.tensors, **{name: x for name, x in passing.items() if x is not None}}


def _specs(lane: Lane, held: Saved, world: int) -> dict[str, StateSpec]:
    like = StateSpec(lane.tensors.lengths)
    return {**lane.slots(world), **{name: like for name in (_CARRIED, _OBSERVED) if name in held}}


def num_savers(saved: Saved) -> int:
    """How many ranks have saved a state like this one."""
    beside, shards = (int(saved.get(f"gradwire/{name}", 1)) for name in ("beside", "shards"))
    return int(saved["gradwire/world"]) * beside * shards


def of_shard(engine: AnyEngine, states: Sequence[Saved]) -> list[Saved]:
    """Of several states, those of this rank's shard."""
    if len(states) == 1 or not isinstance(engine, ShardEngine):
        return list(states)
    mine = [state for state in states if int(state.get("gradwire/shard", 0)) == engine.shard]
    return mine or list(states)


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
    if not isinstance(engine, Engine):
        engine.load_extra_state(mine[0])
    core.step = int(states[0]["gradwire/step"])
    core.seed = int(states[0]["gradwire/seed"])
    core.drops.restart(int(states[0]["gradwire/skipped"]))


def _load_lane(core: Engine, lane: Lane, state: LaneState, mine: Sequence[Saved], states: Sequence[Saved]) -> None:
    memories = _buffers(core, lane, mine, states)
    state.carried, state.observed = memories.pop(_CARRIED, None), memories.pop(_OBSERVED, None)
    if core.rollback:
        state.replace(memories)
        return
    for name, x in state.tensors.items():  # captured steps would keep the old memories as well as the new
        x.copy_(memories[name])


def _buffers(core: Engine, lane: Lane, mine: Sequence[Saved], states: Sequence[Saved]) -> dict[str, Tensor]:
    """One lane's memories. The error of a server may lie with any rank, all others with their owner."""
    places = {key.partition("/")[::2] for state in states for key in state}
    saved = {memory: torch.zeros(0) for memory, name in places if name in lane.slices}
    specs = _specs(lane, saved, core.world)
    no_servers = SERVER_ERROR in saved and SERVER_ERROR not in specs
    if no_servers:  # this world's exchange has no servers, so their error is carried by all
        specs[_CARRIED] = StateSpec(lane.tensors.lengths)
    buffers = zeros(specs, lane.tensors, core.rank, core.world, core.device)
    for memory, spec in specs.items():
        for name, span in spans(spec, lane.tensors, core.rank, core.world).items():
            sources = states if spec.reshard == "shard" else mine
            vector = _merge([state.get(f"{memory}/{name}") for state in sources], spec, span.length)
            if memory == _CARRIED and no_servers:
                served = _merge([state.get(f"{SERVER_ERROR}/{name}") for state in states], _BY_SHARD, span.length)
                if lane.feedback.divides:  # what is carried is in units of updates
                    served = served * divisor(buffers)[span.live].cpu()
                vector = vector + served
            buffers[memory][span.live] = vector[span.own].to(core.device)
    return buffers


def _merge(copies: Sequence[Tensor | None], spec: StateSpec, n: int) -> Tensor:
    """One memory of one parameter, of all ranks' copies; a rank without one holds zeros."""
    known = [torch.zeros(n) if copy is None else copy for copy in copies]
    if len(known) == 1 or spec.reshard == "same":
        return known[0]
    total = torch.stack([copy.double() for copy in known]).sum(0)
    return (total if spec.reshard == "shard" else total / len(known)).float()


def _fingerprint(engine: AnyEngine) -> Tensor:
    shapes = [
        shape for lane in engine.full_plan.lanes for shape in zip(lane.tensors.names, lane.tensors.shapes, strict=True)
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
    _check_shard(engine, states[0])
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


def _check_shard(engine: AnyEngine, state: Saved) -> None:
    saved = tuple(int(state.get(f"gradwire/{name}", value)) for name, value in (("shard", 0), ("shards", 1)))
    mine = (engine.shard, engine.shards) if isinstance(engine, ShardEngine) else (0, 1)
    if saved != mine:
        raise ValueError(
            f"the state is of shard {saved[0]} of {saved[1]}, and this rank holds shard {mine[0]} of {mine[1]}; save "
            "and load through torch.distributed.checkpoint to change the number of shards"
        )


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
                    length = "nothing" if saved is None else f"{saved.numel()} elements"
                    raise ValueError(
                        f"the state holds {length} of {memory} for {name!r}, where {n} elements are needed; "
                        "is it a checkpoint of another model?"
                    )
    if not torch.equal(state["gradwire/model"], _fingerprint(engine)):
        raise ValueError(
            "the state was saved for another model: its trainable parameters differ in name, number or shape; "
            "build that model, or start without the state"
        )
