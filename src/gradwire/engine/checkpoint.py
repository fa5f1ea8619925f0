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
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from gradwire.codecs import StateSpec
from gradwire.core import byte_tensor, raw_bytes
from gradwire.engine.hosts import AnyEngine
from gradwire.engine.lane import Lane
from gradwire.engine.state import LaneState, spans, zeros
from gradwire.engine.step import Engine
from gradwire.exchanges.servers import SERVER_ERROR
from gradwire.feedback.feedback import divisor
from gradwire.version import WIRE_FORMAT

Saved: TypeAlias = Mapping[str, Tensor]
_CARRIED_ERROR, _OBSERVED = "owed", "observed"  # what a lane holds until its next step
_BY_SHARD = StateSpec((), "shard")
_NEEDED = ("format", "rank", "seed", "skipped", "step", "world")  # numbers of every state
_SAVER = {"rank": 0, "world": 1, "local": 0, "beside": 1, "shard": 0, "shards": 1}  # where a state lacks them
_LEAST = {"seed": -(2**63), "world": 1, "beside": 1, "shards": 1, "local": 0, "shard": 0}  # of others, 0


def save(engine: AnyEngine, spec: str) -> dict[str, Tensor]:
    """One rank's state.

    Raises:
        RuntimeError: A step was to be skipped, and could not be.
    """
    inner = engine.unwrapped
    inner.skipped_steps.synchronize()
    place = ("shard", "shards") if inner.shards > 1 else ()
    numbers = {name: getattr(inner, name) for name in ("rank", "seed", "skipped", "step", "world", *place)}
    saved = facts_of(spec, _fingerprint(engine), numbers)
    for lane, state in inner.lanes:
        held = _tensors(state)
        for memory, spec_ in _specs(lane, held, inner.world).items():
            for name, span in spans(spec_, lane.tensors, inner.rank, inner.world).items():
                vector = torch.zeros(span.length)
                vector[span.own] = held[memory][span.live].cpu()
                saved[f"{memory}/{name}"] = vector
    return saved if isinstance(engine, Engine) else {**saved, **engine.extra_state}


def facts_of(spec: str, model: Tensor, numbers: Mapping[str, int]) -> dict[str, Tensor]:
    """The entries of a state that describe its run."""
    facts = {name: torch.tensor(n) for name, n in {"format": WIRE_FORMAT, **numbers}.items()}
    facts |= {"model": model, "spec": byte_tensor(spec.encode())}
    return {f"gradwire/{name}": x for name, x in facts.items()}


def _tensors(state: LaneState) -> dict[str, Tensor]:
    """A lane's memories, and what it holds until its next step."""
    passing = {_CARRIED_ERROR: state.carried_error, _OBSERVED: state.observed}
    return {**state.tensors, **{name: x for name, x in passing.items() if x is not None}}


def _specs(lane: Lane, held: Saved, world: int) -> dict[str, StateSpec]:
    like = StateSpec(lane.tensors.lengths)
    return {**lane.state_specs(world), **{name: like for name in (_CARRIED_ERROR, _OBSERVED) if name in held}}


class Saver(NamedTuple):
    """Which rank saved a state, of how many; where ranks share hosts, ``rank`` and ``world`` are of hosts."""

    rank: int
    world: int
    local_rank: int
    ranks_per_host: int
    shard: int
    shards: int


def saver_of(saved: Saved) -> Saver:
    """Which rank saved a state."""
    return Saver(*(int(saved.get(f"gradwire/{name}", absent)) for name, absent in _SAVER.items()))


def num_savers(saved: Saved) -> int:
    """How many ranks have saved a state like this one."""
    saver = saver_of(saved)
    return saver.world * saver.ranks_per_host * saver.shards


def of_shard(engine: AnyEngine, states: Sequence[Saved]) -> list[Saved]:
    """Of several states, those of this rank's shard."""
    if len(states) == 1 or engine.shards == 1:
        return list(states)
    return [state for state in states if saver_of(state).shard == engine.shard] or list(states)


def same_shape(engine: AnyEngine, saved: Saved) -> bool:
    """Whether a state was saved by as many ranks on as many hosts."""
    saver = saver_of(saved)
    return (saver.world, saver.ranks_per_host) == (engine.unwrapped.world, engine.ranks_per_host)


def is_own(engine: AnyEngine, saved: Saved) -> bool:
    """Whether a state is of this very rank, in a world of the same shape."""
    saver = saver_of(saved)
    place = saver.rank, saver.local_rank
    return same_shape(engine, saved) and place == (engine.unwrapped.rank, engine.local_rank)


def _by_host(engine: AnyEngine, states: Sequence[Saved]) -> list[Saved]:
    """States of ranks that share hosts as states of hosts; a rank's own, and those of single ranks, as they are.

    Raises:
        ValueError: Some of a host's ranks are missing.
    """
    savers = list(map(saver_of, states))
    if all(saver.ranks_per_host == 1 for saver in savers) or (len(states) == 1 and is_own(engine, states[0])):
        return list(states)
    world, per_host = savers[0].world, savers[0].ranks_per_host
    by_place = {(saver.rank, saver.local_rank): state for saver, state in zip(savers, states, strict=True)}
    places = list(product(range(world), range(per_host)))
    if sorted(by_place) != places or len(states) != len(places):
        raise ValueError(
            f"the states are of ranks {sorted(by_place)} as (host, rank on it), of {world} hosts with {per_host} each; "
            f"load each rank's own state or, to change hosts or ranks, the states of all {len(places)} ranks"
        )
    return [_joined([by_place[rank, local_rank] for local_rank in range(per_host)]) for rank in range(world)]


def _joined(host: Sequence[Saved]) -> Saved:
    """What the ranks of one host hold together."""
    of_rank = ("gradwire/local", "gradwire/beside")
    return {key: x for state in host for key, x in state.items() if key not in of_rank}


def load(engine: AnyEngine, states: Sequence[Saved]) -> None:
    """Take over a rank's own state, or reshard the states of all ranks of another world; `check` them first."""
    inner = engine.unwrapped
    states = _by_host(engine, states)
    mine = states
    if saver_of(states[0]).world == inner.world:
        mine = [state for state in states if saver_of(state).rank == inner.rank]
    for lane, state in inner.lanes:
        _load_lane(inner, lane, state, mine, states)
    if not isinstance(engine, Engine):
        engine.load_extra_state(mine[0])
    inner.step = int(states[0]["gradwire/step"])
    inner.seed = int(states[0]["gradwire/seed"])
    inner.skipped_steps.restart(int(states[0]["gradwire/skipped"]))


def _load_lane(inner: Engine, lane: Lane, state: LaneState, mine: Sequence[Saved], states: Sequence[Saved]) -> None:
    memories = _buffers(inner, lane, mine, states)
    state.carried_error, state.observed = memories.pop(_CARRIED_ERROR, None), memories.pop(_OBSERVED, None)
    if inner.rollback:
        state.replace(memories)
        return
    for name, x in state.tensors.items():  # captured steps would keep the old memories as well as the new
        x.copy_(memories[name])


def _buffers(inner: Engine, lane: Lane, mine: Sequence[Saved], states: Sequence[Saved]) -> dict[str, Tensor]:
    """One lane's memories. The error of a server may lie with any rank, all others with their owner."""
    places = {key.partition("/")[::2] for state in states for key in state}
    saved = {memory: torch.zeros(0) for memory, name in places if name in lane.slices}
    specs = _specs(lane, saved, inner.world)
    no_servers = SERVER_ERROR in saved and SERVER_ERROR not in specs
    if no_servers:  # this world's exchange has no servers, so their error is carried by all
        specs[_CARRIED_ERROR] = StateSpec(lane.tensors.lengths)
    buffers = zeros(specs, lane.tensors, inner.rank, inner.world, inner.device)
    for memory, spec in specs.items():
        for name, span in spans(spec, lane.tensors, inner.rank, inner.world).items():
            sources = states if spec.reshard == "shard" else mine
            vector = _merge([state.get(f"{memory}/{name}") for state in sources], spec, span.length)
            if memory == _CARRIED_ERROR and no_servers:
                served = _merge([state.get(f"{SERVER_ERROR}/{name}") for state in states], _BY_SHARD, span.length)
                if lane.feedback.divides:  # what is carried is in units of updates
                    served = served * divisor(buffers)[span.live].cpu()
                vector = vector + served
            buffers[memory][span.live] = vector[span.own].to(inner.device)
    return buffers


def _merge(copies: Sequence[Tensor | None], spec: StateSpec, n: int) -> Tensor:
    """One memory of one parameter, of all ranks' copies; a rank without one holds zeros."""
    known = [torch.zeros(n) if copy is None else copy for copy in copies]
    if len(known) == 1 or spec.reshard == "same":
        return known[0]
    total = torch.stack([copy.double() for copy in known]).sum(0)
    return (total if spec.reshard == "shard" else total / len(known)).float()


def fingerprint_of(shapes: object) -> Tensor:
    """Eight bytes that stand for plain data."""
    return byte_tensor(hashlib.sha256(json.dumps(shapes).encode()).digest()[:8])


def _fingerprint(engine: AnyEngine) -> Tensor:
    shapes = [
        shape for lane in engine.full_plan.lanes for shape in zip(lane.tensors.names, lane.tensors.shapes, strict=True)
    ]
    return fingerprint_of(sorted(shapes))


def saved_spec(state: Saved, needed: Sequence[str] = _NEEDED) -> str:
    """The spec under which a state was saved.

    Raises:
        ValueError: It is no state of gradwire, lacks a number that is needed, or has another format.
    """
    if "gradwire/spec" not in state:
        raise ValueError("this is no gradwire state: it lacks gradwire/spec; pass what state_dict() returned")
    _check_numbers(state, needed)
    if int(state["gradwire/format"]) != WIRE_FORMAT:
        raise ValueError(
            f"the state has format {int(state['gradwire/format'])}, but this gradwire reads {WIRE_FORMAT}; "
            "install the gradwire that saved it"
        )
    return raw_bytes(state["gradwire/spec"]).decode()


def check(engine: AnyEngine, states: Sequence[Saved], spec: str) -> None:
    """Refuse what cannot be loaded.

    Raises:
        ValueError: The state belongs to another spec or model, or is not all that is needed.
    """
    saved, *_ = (saved_spec(state) for state in states or [{}])
    _check_shard(engine, states[0])
    if saved != spec:
        raise ValueError(
            f"the state was saved under the spec [{saved}], but this run has [{spec}]; attach with the saved spec, "
            "load, and then change it with wire.set(...)"
        )
    hosts = _by_host(engine, states)
    if len(states) > 1 or not is_own(engine, states[0]):
        _check_ranks(engine.unwrapped, hosts)
    steps = sorted({int(state["gradwire/step"]) for state in states})
    if len(steps) > 1:
        raise ValueError(f"the states were saved at different steps, {steps}; pass those of one step")
    _check_model(engine, hosts[0])


def _check_numbers(state: Saved, needed: Sequence[str]) -> None:
    """Refuse a state whose numbers no run can have written."""
    for name in dict.fromkeys((*needed, *(one for one in _LEAST if f"gradwire/{one}" in state))):
        value = state.get(f"gradwire/{name}")
        whole = value is not None and value.numel() == 1 and value.dtype == torch.int64
        if value is None or not whole or not _LEAST.get(name, 0) <= int(value) < 2**63 - 2**32:
            found = "missing" if value is None else value.tolist()
            raise ValueError(f"gradwire/{name} of the state is {found}, so it is damaged; load another checkpoint")


def _check_shard(engine: AnyEngine, state: Saved) -> None:
    saver = saver_of(state)
    if (saver.shard, saver.shards) != (engine.shard, engine.shards):
        raise ValueError(
            f"the state is of shard {saver.shard} of {saver.shards}, and this rank holds shard {engine.shard} of "
            f"{engine.shards}; "
            "save and load through torch.distributed.checkpoint to change the number of shards"
        )


def _check_ranks(inner: Engine, states: Sequence[Saved]) -> None:
    world, ranks = saver_of(states[0]).world, sorted(saver_of(state).rank for state in states)
    if ranks != list(range(world)):
        raise ValueError(
            f"the state is of ranks {ranks} of a world of {world}, and this is rank {inner.rank} of "
            f"{inner.world}; load each rank's own state or, to change the world, the states of all {world} ranks"
        )


def _check_model(engine: AnyEngine, state: Saved) -> None:
    lone = saver_of(state).world == 1
    for lane in engine.unwrapped.plan.lanes:
        for memory, spec in lane.state_specs(engine.unwrapped.world).items():
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
