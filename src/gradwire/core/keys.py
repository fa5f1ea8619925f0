"""Key: where every random bit comes from.

There is no generator state. A bit is a function of (seed, step, unit, rank, purpose, element index), so a checkpoint
needs only the step, a resumed run redraws the same bits, and a receiver can redraw the sender's random indices.
"""

import hashlib
from dataclasses import dataclass, replace
from functools import lru_cache

_MASK = 0xFFFFFFFF
SHARED = -1  # the rank written into a key whose bits every rank draws alike
PER_RANK = -2  # the rank of a key to units of many ranks, whose names say whose they are


@dataclass(frozen=True)
class Key:
    """The name of a stream of random bits; it holds none itself.

    Attributes:
        seed: The run's seed, equal on all ranks.
        step: The training step.
        rank: Whose bits they are; `SHARED` when all ranks draw the same, `PER_RANK` when each unit's name has an owner.
        purpose: What they are for. Streams of two purposes are independent.
    """

    seed: int
    step: int
    rank: int
    purpose: str = ""

    def fold(self, purpose: str) -> "Key":
        """A key for an independent stream."""
        return replace(self, purpose=f"{self.purpose}/{purpose}")

    def of(self, rank: int) -> "Key":
        """The same stream as another rank draws it."""
        return replace(self, rank=rank)

    def shared(self) -> "Key":
        """The stream that all ranks draw alike."""
        return self.of(SHARED)

    def counter(self) -> tuple[int, int]:
        """The step, as two 32-bit words of the Philox counter. Whoever draws anything needs it."""
        return self.step & _MASK, self.step >> 32

    def words(self, unit: str) -> tuple[int, int]:
        """The 64-bit Philox key of one unit's stream, as two 32-bit words. The step goes into the counter."""
        owner, _, name = unit.rpartition("\0")
        return _digest(self.seed, name, int(owner) if owner and self.rank == PER_RANK else self.rank, self.purpose)


class Drawn(Exception):
    """Random bits were asked for where there are none."""


class StillKey(Key):
    """The key of a step that will be repeated as it is, for which nothing may be drawn."""

    def counter(self) -> tuple[int, int]:
        raise Drawn("what is drawn for one step is not for another; it cannot be recorded")


def owned(name: str, rank: int) -> str:
    """A unit's name where those of many ranks lie in one buffer; its bits are those that the rank draws alone."""
    return f"{rank}\0{name}"


@lru_cache(maxsize=65536)
def _digest(seed: int, unit: str, rank: int, purpose: str) -> tuple[int, int]:
    text = f"{seed}\0{unit}\0{rank}\0{purpose}".encode()
    raw = hashlib.blake2b(text, digest_size=8).digest()
    return int.from_bytes(raw[:4], "little"), int.from_bytes(raw[4:], "little")
