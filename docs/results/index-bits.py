"""How many bits a position takes in the messages of a real training, beside log2 C(n, k) / k.

    python docs/results/index-bits.py resnet9 /path/with/cifar-10-batches-bin
    python docs/results/index-bits.py lstm /path/with/ptb

One worker trains with DGC (momentum 0.9, memories masked where something was sent), layer by layer or with all
parameters as one vector. A line of JSON for each stretch of steps, in bits a position: the package's codes by `rice`
and by `rows`; the bound; Rice codes in smaller blocks; and what two contexts could give at best: how many are sent of
each row of a weight, the numbers themselves free of charge, then those numbers by their entropy in each weight, whose
distribution is free of charge; and what was sent in the step before.
"""

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradwire.codecs.indices import Rows
from gradwire.core.segments import Segments
from gradwire.kernels import fused, rice
from gradwire.kernels.dispatch import reference_only
from gradwire.kernels.fused import Accumulation
from gradwire.kernels.rice import encode_blocks, gaps_of, width_of
from gradwire.kernels.select import share
from gradwire_lab.train.data.cifar import cifar10
from gradwire_lab.train.data.text import ptb
from gradwire_lab.train.models.lstm import LanguageLSTM
from gradwire_lab.train.models.resnet9 import resnet9

STEPS, EVERY, RULE = 60, 20, Accumulation(momentum=0.9)


def images(root: Path) -> tuple[nn.Module, Iterator[Tensor]]:
    task, model = cifar10(root, strict=False), resnet9()
    draw = torch.Generator().manual_seed(0)

    def losses() -> Iterator[Tensor]:
        while True:
            at = torch.randint(len(task.train), (32,), generator=draw)
            yield F.cross_entropy(model((task.train.pixels[at].float() - 120) / 64), task.train.labels[at])

    return model, losses()


def words(root: Path) -> tuple[nn.Module, Iterator[Tensor]]:
    task = ptb(root, strict=False)
    model = LanguageLSTM(len(task.vocab), hidden=700, dropout=0.0)

    def losses() -> Iterator[Tensor]:
        rows = task.train[: len(task.train) // 20 * 20].view(20, -1)
        state = model.start(20)
        for i in range(0, rows.shape[1] - 36, 35):
            logits, state = model(rows[:, i : i + 35], state)
            state = state[0].detach(), state[1].detach()
            yield F.cross_entropy(logits.flatten(0, 1), rows[:, i + 1 : i + 36].flatten())

    return model, losses()


def bound(n: int, k: int) -> float:
    """log2 C(n, k)."""
    return (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)


def bits(indices: Tensor, n: int, block: int = 512) -> int:
    before, rice.BLOCK = rice.BLOCK, block
    try:
        with reference_only():
            return 8 * encode_blocks(gaps_of(indices), width_of(n)).numel()
    finally:
        rice.BLOCK = before


def row_bits(indices: Tensor, parts: list[nn.Parameter]) -> int:
    table = Segments(tuple(map(str, range(len(parts)))), tuple(tuple(p.shape) for p in parts))
    return 8 * Rows().bind(table).encode(indices, table.total).numel()


def by_rows(indices: Tensor, parts: list[nn.Parameter]) -> tuple[float, float]:
    """The bits of positions within rows of weights, given how many each row has; and those of the numbers."""
    widths = torch.cat([torch.full((p.shape[0],), p[0].numel()) for p in parts])
    ends = widths.cumsum(0)
    counts = torch.bincount(torch.searchsorted(ends, indices, right=True), minlength=len(ends))
    within = sum(bound(n, k) for n, k in zip(widths.tolist(), counts.tolist(), strict=True) if k)
    return within, sum(map(entropy, counts.split([p.shape[0] for p in parts])))


def entropy(numbers: Tensor) -> float:
    """The bits of all numbers, each by how often it occurs."""
    often = numbers.unique(return_counts=True)[1].double()
    return float((often * (often.sum() / often).log2()).sum())


def told_apart(now: Tensor, last: Tensor, n: int) -> float:
    """The bits of two sets: which of the last step's positions come again, and which others come."""
    again = int(torch.isin(now, last).sum())
    return bound(len(last), again) + bound(n - len(last), len(now) - again)


def main(name: str, root: Path) -> None:
    torch.manual_seed(0)
    for density, by_layer in ((0.001, True), (0.001, False)):
        model, losses = (images if name == "resnet9" else words)(root)
        parts = [p for p in model.parameters() if p.dim() > 1]
        lengths = tuple(p.numel() for p in parts) if by_layer else (sum(p.numel() for p in parts),)
        counts, n = tuple(share(density, m) for m in lengths), sum(lengths)
        memories = torch.zeros(n), torch.zeros(n)
        last = torch.zeros(0, dtype=torch.int64)
        seen: list[tuple[float, ...]] = []
        for step, loss in zip(range(STEPS), losses, strict=False):
            model.zero_grad()
            loss.backward()
            grad = torch.cat([p.grad.flatten() for p in parts if p.grad is not None])
            sent = fused.carry_topk_(grad, memories, memories, RULE, lengths, counts, 2)
            update = torch.zeros(n).index_copy_(0, sent.indices, sent.values)
            rate = 0.05 if name == "resnet9" else 1.0
            with torch.no_grad():
                for p, change in zip(parts, update.split([p.numel() for p in parts]), strict=True):
                    p -= rate * change.view_as(p)
                for p in model.parameters():
                    if p.dim() == 1 and p.grad is not None:
                        p -= rate * p.grad
            exact = sum(bound(m, k) for m, k in zip(lengths, counts, strict=True))
            coded = [bits(sent.indices, n, block) for block in (512, 128, 32)] + [row_bits(sent.indices, parts)]
            seen.append((*coded, *by_rows(sent.indices, parts), told_apart(sent.indices, last, n), exact))
            last = sent.indices
            if (step + 1) % EVERY == 0:
                mean = [sum(column) / len(seen) / sum(counts) for column in zip(*seen, strict=True)]
                names = ("rice", "rice_128", "rice_32", "rows", "rows_at_best", "row_numbers", "step_before_at_best")
                names += ("bound",)
                row = {"model": name, "layer_by_layer": by_layer, "density": density, "n": n, "k": sum(counts)}
                row |= {"steps": f"{step + 2 - EVERY}-{step + 1}", "loss": round(loss.item(), 3)}
                row |= {name: round(x, 3) for name, x in zip(names, mean, strict=True)}
                row |= {"ratio": round(mean[0] / mean[-1], 4), "rows_ratio": round(mean[3] / mean[-1], 4)}
                print(json.dumps(row), flush=True)
                seen = []


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
