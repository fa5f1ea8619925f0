"""Gamma: how far ``gamma=auto`` is from the best consensus step that a sweep finds, on noisy quadratics.

Worker i minimizes sum_j c_j (x_j - z_ij)^2 / 2 over 400 entries by gradient descent with noise; its centers z_i differ
from the others', so that workers are pushed apart for ever. What counts is, over the second half of the run, the mean
squared distance between replicas, and the loss above that of the common optimum.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradwire.gossip import Diverged
from gradwire.integrations.gossip import BatchedGossip

ENTRIES = 400
GRID = tuple(1.26**-k for k in range(30))
FAR = 4.0
CODECS = (
    "sign",
    *(f"topk({share}) | int32" for share in (0.01, 0.1, 0.5)),
    *(f"randomk({share})" for share in (0.01, 0.1, 0.5)),
    *(f"randomk({share}, shared=False)" for share in (0.01, 0.1, 0.5)),
    *(f"qsgd(levels={2**bits - 1}, bucket=None, biased=True)" for bits in (2, 4, 8, 16)),
)


class NoisyQuadratic(NamedTuple):
    """A graph, and what happens on it.

    Attributes:
        curvature: Of the steepest entry; the flattest has a tenth. 0: there is no gradient, only noise.
        apart: How much centers differ.
    """

    graph: str
    workers: int
    steps: int
    curvature: float = 1.0
    apart: float = 0.3
    noise: float = 0.5
    rate: float = 0.1


PROBLEMS = (NoisyQuadratic("ring", 8, 700), NoisyQuadratic("torus", 16, 600), NoisyQuadratic("social", 32, 500))


class Outcome(NamedTuple):
    """Time averages over the second half, and the median step there."""

    distance: float
    loss: float
    gamma: float


def drive(problem: NoisyQuadratic, codec: str, gamma: float | None, seed: int) -> Outcome:
    """One run; with no gamma, ``auto``. One that diverges is infinitely bad."""
    try:
        return _drive(problem, codec, gamma, seed)
    except Diverged:
        return Outcome(math.inf, math.inf, gamma or math.nan)


def _drive(problem: NoisyQuadratic, codec: str, gamma: float | None, seed: int) -> Outcome:
    draw = torch.Generator().manual_seed(seed)
    curvature = problem.curvature * torch.logspace(-1, 0, ENTRIES)
    common = torch.randn(ENTRIES, generator=draw)
    centers = common + problem.apart * torch.randn(problem.workers, ENTRIES, generator=draw)
    step = "auto" if gamma is None else repr(gamma)
    model = nn.ParameterDict({"x": torch.zeros(ENTRIES)})
    net = BatchedGossip(model, problem.workers, f"choco({problem.graph}, gamma={step})", codec, seed=seed)
    x, sums, gammas = torch.zeros(problem.workers, ENTRIES), torch.zeros(2, dtype=torch.float64), []
    for turn in range(problem.steps):
        noise = problem.noise * torch.randn(x.shape, generator=draw)
        x = net.mix(x - problem.rate * (curvature * (x - centers) + noise))
        if 2 * turn >= problem.steps:
            sums += _measure(x, curvature, centers.mean(0))
            gammas.append(net.gamma)
    distance, loss = (sums / len(gammas)).tolist()
    return Outcome(distance, loss, sorted(gammas)[len(gammas) // 2])


def _measure(x: Tensor, curvature: Tensor, optimum: Tensor) -> Tensor:
    distance = (x - x.mean(0)).square().sum(1).mean()
    loss = (0.5 * curvature * (x - optimum).square()).sum(1).mean()
    return torch.stack((distance, loss)).double()


def compare(problem: NoisyQuadratic, codec: str, seeds: Sequence[int], grid: Sequence[float] = GRID) -> dict[str, Any]:
    """``auto`` beside the best of a grid, means over seeds; the best distance and the best loss may be two gammas.

    Of the grid, what lies within a factor of `FAR` of where ``auto`` went is tried.
    """
    auto = _mean([drive(problem, codec, None, seed) for seed in seeds])
    near_by = [gamma for gamma in grid if auto.gamma / FAR <= gamma <= auto.gamma * FAR]
    swept = {gamma: _mean([drive(problem, codec, gamma, seed) for seed in seeds]) for gamma in near_by}
    near = min(swept, key=lambda gamma: swept[gamma].distance)
    low = min(swept, key=lambda gamma: swept[gamma].loss)
    return {
        **problem._asdict(),
        "codec": codec,
        "seeds": list(seeds),
        "best": near,
        "best_by_loss": low,
        "auto": auto.gamma,
        "distance": auto.distance / swept[near].distance,
        "loss": auto.loss / swept[low].loss,
    }


def table(lines: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Markdown: a row for each codec, in the order of `CODECS`, four columns for each graph."""
    lines = sorted(lines, key=lambda line: CODECS.index(line["codec"]))
    graphs = list(dict.fromkeys((line["graph"], line["workers"]) for line in lines))
    heads = [f"{graph}-{workers}: best | auto | distance | loss" for graph, workers in graphs]
    yield f"| codec | {' | '.join(heads)} |"
    yield "|---|" + "---|" * (4 * len(graphs))
    for codec in dict.fromkeys(line["codec"] for line in lines):
        same = [line for line in lines if line["codec"] == codec]
        row = [f"{x['best']:.2g} | {x['auto']:.2g} | {x['distance']:.2f} | {x['loss']:.2f}" for x in same]
        plain = codec.replace(" | int32", "")
        yield f"| `{plain}` | {' | '.join(row)} |"


def _mean(runs: Sequence[Outcome]) -> Outcome:
    columns = zip(*runs, strict=True)
    return Outcome(*(sum(column) / len(runs) for column in columns))
