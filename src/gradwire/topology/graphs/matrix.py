"""Matrix: any mixing weights of the user's.

Paper:    none: the weights are the user's
Formula:  w_ij = rows[i][j], the weight with which i hears j
Wire:     nothing
Traits:   the one size that it has; doubly stochastic, or column-stochastic alone where directed=True
Differs:  as there is no paper, from nothing
Spec:     matrix([[0.5, 0.5], [0.5, 0.5]]), matrix([[0.5, 1.0], [0.5, 0.0]], directed=True)
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gradwire.core.registry import register
from gradwire.topology.checks import Promise, Round
from gradwire.topology.graph import Graph

Rows = tuple[tuple[float, ...], ...]


@register("matrix", kind="topology")
@dataclass(frozen=True)
class Matrix(Graph):
    """Weights in full.

    Attributes:
        rows: W, as nested lists or a tensor.
        directed: Whether columns alone sum to 1, as push-sum asks, and rows need not.
    """

    rows: Rows
    directed: bool = False
    examples: ClassVar[tuple[str, ...]] = (
        "matrix([[0.5, 0.5], [0.5, 0.5]])",
        "matrix([[0.5, 1.0], [0.5, 0.0]], directed=True)",
    )

    def __post_init__(self) -> None:
        given = self.rows.tolist() if isinstance(self.rows, Tensor) else self.rows
        try:
            rows = tuple(tuple(float(weight) for weight in row) for row in given)
        except (TypeError, ValueError):
            raise ValueError("matrix needs rows of numbers; write matrix([[0.5, 0.5], [0.5, 0.5]])") from None
        for i, row in enumerate(rows):
            if len(row) != len(rows):
                raise ValueError(f"matrix has {len(rows)} rows, but row {i} has {len(row)} entries; it must be square")
        object.__setattr__(self, "rows", rows)

    @property
    def promise(self) -> Promise:
        return "column" if self.directed else "doubly"

    def rounds(self, size: int) -> tuple[Round, ...]:
        if size != len(self.rows):
            raise ValueError(f"matrix has {len(self.rows)} rows, so it has as many ranks, not {size}")
        return (
            tuple(
                tuple((j, weight) for j, weight in enumerate(row) if weight or i == j)
                for i, row in enumerate(self.rows)
            ),
        )
