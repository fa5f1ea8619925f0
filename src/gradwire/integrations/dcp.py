"""Checkpoints of torch.distributed.checkpoint: the state of a wire beside that of its model, also for another mesh.

Errors differ between replicas, so ``residual/fc.weight/0`` is what the memory ``residual`` of the first replica holds
for the parameter ``fc.weight``. It is laid out as the parameter is, so any number of shards can read it. A memory of
one shard only, such as a basis of PowerSGD, also has the number of the shard in its name, and another mesh starts
without it.
"""

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_into
from torch.distributed.checkpoint.storage import StorageReader

from gradwire.engine.hosts import HostEngine
from gradwire.integrations.checkpoint import agreed_state, handle_of
from gradwire.integrations.model import distributed_as, local_part
from gradwire.integrations.optimizer import DistributedOptimizer
from gradwire.integrations.wire import Wire

_FACTS = ("format", "seed", "skipped", "step", "world", "spec")  # which all ranks share


def state_dict(wire: Wire | DistributedOptimizer) -> dict[str, Any]:
    """The state as ``torch.distributed.checkpoint.save`` and ``async_save`` take it, in a dictionary of their own.

    All ranks must call it.
    """
    wire = _wire_of(wire)
    place, saved = ShardPlace(wire), agreed_state(wire)
    facts = {f"gradwire/{name}": saved[f"gradwire/{name}"] for name in _FACTS}
    facts["gradwire/shards"] = torch.tensor(place.shards)
    memories = {key: x for key, x in saved.items() if not key.startswith("gradwire/")}
    return facts | {place.key(key, place.replica): place.lay_out(key, x) for key, x in memories.items()}


def load(
    wire: Wire | DistributedOptimizer, checkpoint: str | os.PathLike[str] | StorageReader, key: str = "wire"
) -> None:
    """Take over a state that any number of replicas and shards have saved. All ranks must call it.

    Errors of the saved replicas are divided among the current ones, so that their mean, which is still to be applied,
    stays the same.

    Args:
        wire: One with the spec under which the state was saved.
        checkpoint: The folder, or a storage reader of torch.distributed.checkpoint.
        key: The key under which the state was saved, as in ``save({"wire": state_dict(wire), "model": ...})``.
    """
    wire = _wire_of(wire)
    reader = checkpoint if isinstance(checkpoint, StorageReader) else FileSystemReader(checkpoint)
    stored: dict[str, Any] = reader.read_metadata().state_dict_metadata
    facts = {
        name.removeprefix(f"{key}."): torch.empty(x.size, dtype=x.properties.dtype)
        for name, x in stored.items()
        if name.startswith(f"{key}.gradwire/")
    }
    if not facts:
        raise ValueError(f"{checkpoint} holds no state under {key!r}; pass the key that it was saved under")
    load_into({key: facts}, storage_reader=reader)
    place, replicas = ShardPlace(wire), int(facts["gradwire/world"])
    chosen = [place.replica] if replicas == place.replicas else range(replicas)
    targets = {
        (name, replica): x
        for replica in chosen
        for name, x in place.memories(alike=int(facts["gradwire/shards"]) == place.shards)
    }
    found = {place.key(*name): x for name, x in targets.items() if f"{key}.{place.key(*name)}" in stored}
    load_into({key: found}, storage_reader=reader)
    wire.load_state_dict([{**facts, **place.state(replica, found)} for replica in chosen])


def _wire_of(given: Wire | DistributedOptimizer) -> Wire:
    handle = handle_of(given)
    if not isinstance(handle, Wire):
        raise TypeError(
            f"the state of {type(handle).__name__} is not kept by torch.distributed.checkpoint; write and read it with "
            "gradwire.save and gradwire.load"
        )
    return handle


class ShardPlace:
    """Where a rank is among replicas and shards, and what its memories are called in a checkpoint."""

    def __init__(self, wire: Wire) -> None:
        engine, self._wire = wire.engine, wire
        if isinstance(engine, HostEngine):
            raise ValueError("with across='hosts' ranks share the state; use gradwire.save and gradwire.load")
        inner = engine.unwrapped
        self.replica, self.replicas, self._lanes = inner.rank, inner.world, inner.plan.lanes
        self.shard, self.shards = engine.shard, engine.shards
        # Memories with an entry for each of the parameter's.
        self._elementwise = {"owed", "observed", "pending", "served"}
        for lane in self._lanes:
            self._elementwise |= {
                *lane.feedback.memories,
                *(name for _, codec, _ in lane.step_table for name in codec.memories),
            }

    def _is_elementwise(self, name: str) -> bool:
        return name.partition("/")[0] in self._elementwise

    def key(self, name: str, replica: int) -> str:
        """The name of a memory of a replica in a checkpoint."""
        return f"{name}/{replica}" if self._is_elementwise(name) else f"{name}/{replica}.{self.shard}"

    def lay_out(self, name: str, x: Tensor) -> Tensor:
        """A memory as this rank's part of a tensor like the parameter."""
        if not self._is_elementwise(name):
            return x
        p = self._wire.parameters[name.partition("/")[2]]
        return distributed_as(p, x.view(local_part(p).shape))

    def memories(self, alike: bool) -> Iterator[tuple[str, Tensor]]:
        """Zeros for all memories that a state of this rank may hold; those of a shard alone if shards are ``alike``."""
        for lane in self._lanes:
            like = dict.fromkeys(self._elementwise, lane.tensors.lengths)
            slots = {memory: slot.lengths for memory, slot in lane.state_specs(self.replicas).items() if alike}
            for memory, lengths in {**slots, **like}.items():
                for name, n in zip(lane.tensors.names, lengths, strict=True):
                    yield f"{memory}/{name}", self.lay_out(f"{memory}/{name}", torch.zeros(n))

    def state(self, replica: int, loaded: dict[str, Tensor]) -> dict[str, Tensor]:
        """One replica's state as `Wire.load_state_dict` takes it; what was not loaded is zero, as in a new wire."""
        mine = self._wire.state_dict()
        facts = {"rank": replica, "shard": self.shard, "shards": self.shards}
        state = {f"gradwire/{name}": torch.tensor(n) for name, n in facts.items()}
        state["gradwire/model"] = mine["gradwire/model"]
        for name, zeros in self.memories(alike=True):
            x = loaded.get(self.key(name, replica), zeros if name in mine else None)
            if x is not None:
                state[name] = local_part(x).cpu().flatten()
        return state
