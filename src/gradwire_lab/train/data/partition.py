"""Partition: which rank sees which examples, in which order.

There is no state: the order is a function of (seed, epoch), so a checkpoint needs only the epoch and the step, and a
run may go on with another number of ranks.
"""

import hashlib

import torch
from torch import Generator, Tensor

KINDS = ("shuffled", "fixed", "sorted")


def generator(seed: int, *names: object) -> Generator:
    """A CPU generator for one purpose; other names, independent numbers."""
    text = "\0".join(map(str, (seed, *names))).encode()
    digest = hashlib.blake2b(text, digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)  # 63 bits, so never negative


def shards(
    n: int, world: int, seed: int, epoch: int, kind: str = "shuffled", labels: Tensor | None = None
) -> list[Tensor]:
    """The examples of every rank, in the order of one epoch: disjoint, covering, and of lengths that differ by one.

    Args:
        n: How many examples there are.
        world: How many ranks share them.
        seed: The run's seed, equal on all ranks.
        epoch: Which epoch; one that stays the same keeps the order.
        kind: ``shuffled`` deals all examples again each epoch. ``fixed`` deals them once, at random, and ``sorted``
            once, sorted by label, so that a rank sees few classes; both shuffle every epoch within a rank.
        labels: What to sort by, [n].
    """
    if kind not in KINDS:
        raise ValueError(f"there is no partition called {kind!r}; choose among {', '.join(KINDS)}")
    if world > n:
        raise ValueError(f"{n} examples are not enough for {world} ranks")
    if kind == "shuffled":
        return list(torch.randperm(n, generator=generator(seed, "order", epoch)).tensor_split(world))
    if kind == "fixed":
        dealt = torch.randperm(n, generator=generator(seed, "parts"))
    elif labels is None:
        raise ValueError("the partition 'sorted' needs labels to sort by, and this data has none; choose 'fixed'")
    else:
        dealt = labels.cpu().argsort(stable=True)
    orders = (generator(seed, "order", epoch, rank) for rank in range(world))
    parts = zip(dealt.tensor_split(world), orders, strict=True)
    return [part[torch.randperm(len(part), generator=order)] for part, order in parts]


def slices(n: int, world: int) -> list[range]:
    """Neighboring examples for every rank, in order: how evaluation is shared. Some are empty if there are few."""
    return [range(n * rank // world, n * (rank + 1) // world) for rank in range(world)]


def columns(tokens: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """A text [n] as ``num`` columns that are read side by side: inputs and their next tokens, [num, (n - 1) // num]."""
    length = (len(tokens) - 1) // num
    if length < 1:
        raise ValueError(
            f"a text of {len(tokens)} tokens is too short for {num} columns, one for each example of a step; lower "
            "train.batch or train.accumulate, use fewer workers, or give more text"
        )
    return tokens[: num * length].view(num, length), tokens[1 : num * length + 1].view(num, length)
