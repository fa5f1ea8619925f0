"""Direct: top-k of gradients where they lie, and the mean back to the same place.

On a CPU, a step of a sparse method costs what it costs to touch memory. So where an adapter donates its gradients,
which nobody needs once they are encoded, they are read where backward left them, and the few entries of the mean are
written there among zeros. Nothing is laid end to end; and the new memories are written into storage of the step before
the last, which is kept for that, because fresh pages from the system cost more than all the rest. Without rollback they
are written over the old.

The law is that of `lowering`: nobody can tell, but for time.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.codecs.selectors import TopK
from gradwire.codecs.stage import Memory
from gradwire.core.keys import Key
from gradwire.core.requests import CommGenerator, Gather
from gradwire.engine.lane import Lane, Released
from gradwire.engine.lowering import rule_of
from gradwire.exchanges import AllGather
from gradwire.feedback import MomentumCorrection
from gradwire.kernels import fused

_LONG = 2**17  # elements: many short runs are read faster once they are laid end to end


class Laid(NamedTuple):
    """The vector of a lane as it lies in memory: one flat tensor for each of its parameters."""

    parts: tuple[Tensor, ...]

    def zero_(self) -> "Laid":
        for part in self.parts:
            part.zero_()
        return self


class Run(NamedTuple):
    """Neighboring parameters that are neighbors in memory too.

    Attributes:
        start: Where it lies in the lane's vector.
        flat: Its entries.
        lengths: Of its parameters.
    """

    start: int
    flat: Tensor
    lengths: tuple[int, ...]


def laid(lane: Lane, grads: Mapping[str, Tensor | None], memory: Memory, key: Key, world: int) -> Laid | None:
    """The gradients of a lane that `talk` can serve; None for any other."""
    codec, exchange = lane.at(key.step)
    if not isinstance(codec.selector, TopK) or not isinstance(exchange, AllGather) or lane.units != lane.tensors:
        return None
    if not lane.lowered(memory, key, world) or world * codec.most(lane.units) > lane.units.total:
        return None
    parts = []
    for name in lane.tensors.names:
        grad = grads[name]
        if grad is None or grad.layout != torch.strided or grad.dtype != torch.float32 or grad.device.type != "cpu":
            return None
        if not grad.is_contiguous():
            return None
        parts.append(grad.detach().view(-1))
    found = Laid(tuple(parts))
    return found if lane.units.total >= _LONG * sum(1 for _ in _runs(found)) else None


def talk(
    lane: Lane, vector: Laid, memory: Memory, key: Key, world: int, broken: list[Tensor], rollback: bool = True
) -> CommGenerator[Released]:
    """What `Lane.talk_fused` does."""
    codec, _ = lane.at(key.step)
    runs = list(_runs(vector))
    held = _turned(lane, memory) if rollback else dict(memory)
    found = [_accumulate(lane, run, memory, held, key) for run in runs]
    broken.extend(one.broken for one in found)
    indices = torch.cat([one.indices + run.start for one, run in zip(found, runs, strict=True)])
    values = torch.cat([one.values for one in found])
    payload, sent = codec.encode_selected(indices, values, lane.units, key)
    assert sent.indices is not None
    masked = held["momentum"] if getattr(lane.feedback, "masking", False) else None
    fused.settle_(held["residual"], masked, sent.indices, sent.values)
    payloads = yield Gather(payload, codec.size(lane.units) if codec.traits.fixed else None)
    entries = codec.entries(payloads, lane.units, [key.of(rank) for rank in range(world)])
    for run in runs:
        fused.scatter_mean_(run.flat, *entries, run.start, world)
    return Released(vector, held)


def _runs(vector: Laid) -> Iterator[Run]:
    start, group = 0, list[Tensor]()
    for part in vector.parts:
        if group and not _neighbors(group[-1], part):
            yield _run(start, group)
            start += sum(one.numel() for one in group)
            group = []
        group.append(part)
    yield _run(start, group)


def _neighbors(left: Tensor, right: Tensor) -> bool:
    adjacent = left.data_ptr() + 4 * left.numel() == right.data_ptr()
    return adjacent and left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()


def _run(start: int, group: Sequence[Tensor]) -> Run:
    lengths = tuple(one.numel() for one in group)
    return Run(start, group[0].as_strided((sum(lengths),), (1,)), lengths)


def _turned(lane: Lane, memory: Memory) -> dict[str, Tensor]:
    """The memories to be written now, still empty. The old stay until the step is committed, then take turns."""
    held = dict(memory)
    for name in lane.feedback.memories:
        old, spare = memory[name], memory.get(f"spare {name}")
        held[name] = torch.empty_like(old) if spare is None or spare.shape != old.shape else spare
        held[f"spare {name}"] = old
    return held


def _accumulate(lane: Lane, run: Run, memory: Memory, held: dict[str, Tensor], key: Key) -> fused.Selected:
    """Add a run's gradients to the old memories, which gives the new ones, and select."""
    codec, _ = lane.at(key.step)
    rule = rule_of(lane.feedback)
    assert rule is not None and codec.selector is not None
    place = slice(run.start, run.start + run.flat.numel())
    momentum = isinstance(lane.feedback, MomentumCorrection)
    after = held["residual"][place], held["momentum"][place] if momentum else None
    before = after
    if held["residual"] is not memory["residual"]:
        before = memory["residual"][place], memory["momentum"][place] if momentum else None
    counts = tuple(map(codec.selector.capacity, run.lengths))
    hint = f"edge {run.start} {counts}"
    found = fused.carry_topk_(run.flat, before, after, rule, run.lengths, counts, held.get(hint))
    held[hint] = found.edge
    return found
