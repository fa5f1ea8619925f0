"""Sequences: batches of a text, in columns that are read on and on, or in windows that are shuffled."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from gradwire_lab.train.data.images import Batch
from gradwire_lab.train.data.partition import columns, generator, shards, slices

IGNORED = -100  # the target that torch's cross entropy leaves out


@dataclass(frozen=True)
class ColumnLoader:
    """For recurrent models: ``world * batch`` columns of the text, each rank's ones side by side.

    A batch is the next ``bptt`` tokens of every column, [len(ranks) * batch, bptt], those of the first rank first; the
    state after one is the state before the next. Every epoch is the same. The last batch may be shorter.
    """

    tokens: Tensor
    batch: int
    bptt: int
    world: int = 1
    ranks: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        columns(self.tokens, self.world * self.batch)

    @property
    def steps(self) -> int:
        """Batches in an epoch, the same on every rank."""
        return -(-((len(self.tokens) - 1) // (self.world * self.batch)) // self.bptt)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from step ``start`` on."""
        del epoch
        whole = (part.view(self.world, self.batch, -1) for part in columns(self.tokens, self.world * self.batch))
        inputs, targets = (part[list(self.ranks)].flatten(0, 1) for part in whole)
        for step in range(start, self.steps):
            part = slice(step * self.bptt, (step + 1) * self.bptt)
            yield Batch(inputs[:, part], targets[:, part])


@dataclass(frozen=True)
class WindowLoader:
    """For models that read a whole window at once: windows of ``length`` tokens, dealt to the ranks like images.

    Windows do not overlap, and every epoch cuts them at another offset. A batch is [len(ranks) * batch, length].
    """

    tokens: Tensor
    batch: int
    length: int
    world: int = 1
    ranks: tuple[int, ...] = (0,)
    seed: int = 0
    reshuffle: bool = True

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(
                f"{len(self.tokens)} tokens are {max(0, self.windows)} windows of {self.length}, too few for "
                f"{self.world} ranks with a batch of {self.batch}; lower data.length or train.batch, or use fewer "
                "workers or a longer text"
            )

    @property
    def windows(self) -> int:
        return (len(self.tokens) - self.length) // self.length  # whatever the offset

    @property
    def steps(self) -> int:
        """Batches in an epoch, the same on every rank."""
        return self.windows // self.world // self.batch

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from step ``start`` on."""
        when = epoch if self.reshuffle else 0
        parts = shards(self.windows, self.world, self.seed, when)
        order = torch.stack([parts[rank][: self.steps * self.batch] for rank in self.ranks])
        offset = torch.randint(self.length, (1,), generator=generator(self.seed, "offset", when))
        firsts = (order * self.length + offset).to(self.tokens.device)
        within = torch.arange(self.length, device=self.tokens.device)
        for step in range(start, self.steps):
            first = firsts[:, step * self.batch : (step + 1) * self.batch].reshape(-1, 1)
            yield Batch(self.tokens[first + within], self.tokens[first + within + 1])


def reading(tokens: Tensor, num: int, bptt: int, rank: int = 0, world: int = 1) -> Iterator[Batch]:
    """A text to evaluate on, in ``num`` columns, of which each rank reads its share; a rank may have none.

    Every token but the first is a target once: the columns are padded with `IGNORED`. The perplexity does not depend on
    the number of ranks.
    """
    targets = len(tokens) - 1
    length = -(-targets // num)
    padding = num * length - targets
    mine = slices(num, world)[rank]
    rows = slice(mine.start, mine.stop)
    inputs = F.pad(tokens[:-1], (0, padding)).view(num, length)[rows]
    wanted = F.pad(tokens[1:], (0, padding), value=IGNORED).view(num, length)[rows]
    for first in range(0, length if len(mine) else 0, bptt):
        yield Batch(inputs[:, first : first + bptt], wanted[:, first : first + bptt])
