"""Topology: a graph of some size with its mixing weights, as a pure value.

W[i, j] is the weight that rank i gives to rank j, so one round of gossip is x = W x. A graph that changes from step to
step repeats after `period` rounds. Every topology is checked when it is built: see `checks`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce

import torch
from torch import Tensor

from gradwire.topology.checks import TOLERANCE, MixingRows, Promise, check, networkx, transposed


@dataclass(frozen=True)
class Topology:
    """Mixing weights of every rank in every round.

    Attributes:
        name: What it is called in sentences, for example "ring".
        promise: What was checked of W beside rows, columns and connection: "symmetric", "doubly" (stochastic), or
            "column" (stochastic alone, which push-sum needs and plain gossip cannot use).
        rounds: For each round of a period and each rank, the (peer, weight) pairs of its row of W, itself included.
    """

    name: str
    promise: Promise
    rounds: tuple[MixingRows, ...] = field(repr=False)

    def __post_init__(self) -> None:
        if not self.rounds or not self.rounds[0]:
            raise ValueError(f"{self.name}: a topology needs a round of weights, and a round a rank; give it some")
        check(str(self), self.promise, self.rounds)

    @staticmethod
    def of(name: str, promise: Promise, matrices: Sequence[Tensor]) -> "Topology":
        """From one matrix per round of a period."""
        return Topology(name, promise, tuple(sparse_rows(matrix.tolist()) for matrix in matrices))

    def __str__(self) -> str:
        short = self.name if len(self.name) <= 60 else f"{self.name[:57]}..."
        return f"{short} on {self.size} rank{'s' if self.size > 1 else ''}"

    @property
    def size(self) -> int:
        return len(self.rounds[0])

    @property
    def period(self) -> int:
        """After how many rounds the weights repeat; 1 for a static graph."""
        return len(self.rounds)

    def peers(self, rank: int, step: int = 0) -> dict[int, float]:
        """In-neighbors of a rank, with the weight it gives them; the rank itself excluded."""
        return {j: weight for j, weight in self._line(self.rounds, rank, step) if j != rank and weight}

    def out_peers(self, rank: int, step: int = 0) -> dict[int, float]:
        """Out-neighbors of a rank, with the weight they give it; the rank itself excluded."""
        return {i: weight for i, weight in self._line(self._columns, rank, step) if i != rank and weight}

    def self_weight(self, rank: int, step: int = 0) -> float:
        """W[rank, rank]."""
        return dict(self._line(self.rounds, rank, step)).get(rank, 0.0)

    def matrix(self, step: int = 0) -> Tensor:
        """W at a step, float64 [size, size]."""
        rows = [[0.0] * self.size for _ in range(self.size)]
        for dense, row in zip(rows, self.rounds[step % self.period], strict=True):
            for j, weight in row:
                dense[j] = weight
        return torch.tensor(rows, dtype=torch.float64)

    def product(self) -> Tensor:
        """What a whole period does to x: the last round's W times ... times the first's."""
        return reduce(lambda done, step: self.matrix(step) @ done, range(1, self.period), self.matrix(0))

    @cached_property
    def rho(self) -> float:
        """The spectral gap 1 - |lambda_2| of W.

        Where weights change it is the gap per round, 1 - |lambda_2|^(1/period), with lambda_2 of the period's product.
        Alone on its graph a rank is at consensus: the gap is 1.
        """
        product = self.product()
        plain = self.symmetric and self.period == 1
        values = torch.linalg.eigvalsh(product) if plain else torch.linalg.eigvals(product)
        moduli = values.abs().sort(descending=True).values.tolist()
        second = moduli[1] if self.size > 1 and moduli[1] > 1e-12 else 0.0  # below lies rounding; a root would lift it
        return 1.0 - float(min(second, 1.0) ** (1.0 / self.period))

    @cached_property
    def beta(self) -> float:
        """The spectral norm of I - W, the largest over a period."""
        eye = torch.eye(self.size, dtype=torch.float64)
        return max(float(torch.linalg.matrix_norm(eye - self.matrix(step), 2)) for step in range(self.period))

    @property
    def degrees(self) -> tuple[int, ...]:
        """How many messages each rank sends in a step, the most over a period."""
        steps, ranks = range(self.period), range(self.size)
        return tuple(max(len(self.out_peers(rank, step)) for step in steps) for rank in ranks)

    @property
    def degree(self) -> int:
        """The most messages that any rank sends in a step."""
        return max(self.degrees)

    def distances(self, root: int) -> tuple[int, ...]:
        """How many edges of step 0 lie between each rank and ``root``; as many as there are ranks where no path is."""
        edges = [(rank, peer) for rank in range(self.size) for peer in self.peers(rank)]
        lengths = networkx().single_source_shortest_path_length(networkx().DiGraph([(root, root), *edges]), root)
        return tuple(lengths.get(rank, self.size) for rank in range(self.size))

    @cached_property
    def symmetric(self) -> bool:
        """Whether W[i, j] = W[j, i] in every round."""
        matrices = map(self.matrix, range(self.period))
        return all(bool((matrix - matrix.T).abs().max() <= TOLERANCE) for matrix in matrices)

    @cached_property
    def doubly_stochastic(self) -> bool:
        """Whether rows sum to 1 as columns do, so that plain gossip keeps the average."""
        return all(abs(sum(weight for _, weight in row) - 1.0) <= TOLERANCE for line in self.rounds for row in line)

    @cached_property
    def _columns(self) -> tuple[MixingRows, ...]:
        return tuple(map(transposed, self.rounds))

    def _line(self, table: tuple[MixingRows, ...], rank: int, step: int) -> tuple[tuple[int, float], ...]:
        if not 0 <= rank < self.size:
            raise ValueError(f"{self} has no rank {rank}; ranks run from 0 to {self.size - 1}")
        return table[step % self.period][rank]


def sparse_rows(rows: Sequence[Sequence[float]]) -> MixingRows:
    """The entries of W that are not zero, and those of each rank itself."""
    return tuple(
        tuple((j, float(weight)) for j, weight in enumerate(row) if weight or i == j) for i, row in enumerate(rows)
    )
