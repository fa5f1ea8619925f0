"""Key: where every random bit comes from.

There is no generator state. A bit is a function of (seed, step, unit, rank, purpose, element index), so a checkpoint
needs only the step, a resumed run redraws the same bits, and a receiver can redraw the sender's random indices.
"""

import hashlib
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

_MASK = 0xFFFFFFFF
SHARED = -1  # the rank written into a key whose bits every rank draws alike
PER_RANK = -2  # the rank of a key to units of many ranks, whose names are `qualified`


@dataclass(frozen=True)
class Key:
    """The name of a stream of random bits; it holds none itself.

    Attributes:
        seed: The run's seed, equal on all ranks.
        step: The training step.
        rank: Whose bits they are; `SHARED` when all ranks draw the same, `PER_RANK` when each unit's name has an owner.
        purpose: What they are for. Streams of two purposes are independent.
        device_counter: Of a captured step: the step as int64[2] in device memory, read at every replay.
    """

    seed: int
    step: int
    rank: int
    purpose: str = ""
    device_counter: Any = field(default=None, compare=False, repr=False)

    def fold(self, purpose: str) -> "Key":
        """A key for an independent stream."""
        return replace(self, purpose=f"{self.purpose}/{purpose}")

    def of(self, rank: int) -> "Key":
        """The same stream as another rank draws it."""
        return replace(self, rank=rank)

    def shared(self) -> "Key":
        """The stream that is the same on all ranks."""
        return self.of(SHARED)

    def counter(self) -> tuple[int, int]:
        """The step, as two 32-bit words of the Philox counter.

        Raises:
            RandomnessInGraph: The step is captured, so the host has no number of it.
        """
        if self.device_counter is not None:
            raise RandomnessInGraph("random bits drawn by the host would be the same at every replay of a graph")
        return self.step & _MASK, self.step >> 32

    def words(self, unit: str) -> tuple[int, int]:
        """The 64-bit Philox key of one unit's stream, as two 32-bit words. The step goes into the counter."""
        owner, _, name = unit.rpartition("\0")
        return _digest(self.seed, name, int(owner) if owner and self.rank == PER_RANK else self.rank, self.purpose)


class RandomnessInGraph(Exception):
    """Random bits were drawn by the host inside a captured step, where they would be the same at every replay."""


def qualified(name: str, rank: int) -> str:
    """A unit's name where those of many ranks lie in one buffer; its bits are those that the rank draws alone."""
    return f"{rank}\0{name}"


@lru_cache(maxsize=65536)
def _digest(seed: int, unit: str, rank: int, purpose: str) -> tuple[int, int]:
    text = f"{seed}\0{unit}\0{rank}\0{purpose}".encode()
    raw = hashlib.blake2b(text, digest_size=8).digest()
    return int.from_bytes(raw[:4], "little"), int.from_bytes(raw[4:], "little")
