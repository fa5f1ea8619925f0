"""Neighbor columns: the first neighbor of every rank, then the second, and so on, so that all ranks mix at once."""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.topology import Topology

CPU = torch.device("cpu")


class NeighborColumn(NamedTuple):
    """One neighbor of every rank.

    Attributes:
        peers: int64 [ranks].
        weights: float64 [ranks, 1].
    """

    peers: Tensor
    weights: Tensor


@lru_cache(maxsize=64)
def neighbor_columns(topology: Topology, phase: int = 0, device: torch.device = CPU) -> tuple[NeighborColumn, ...]:
    """Neighbors in one round of a period, by rising rank, filled up with the rank itself at weight zero."""
    peers = [sorted(topology.peers(rank, phase).items()) for rank in range(topology.size)]
    most = max(map(len, peers))
    padded = [row + [(rank, 0.0)] * (most - len(row)) for rank, row in enumerate(peers)]
    return tuple(
        NeighborColumn(
            torch.tensor([peer for peer, _ in column], device=device),
            torch.tensor([[weight] for _, weight in column], dtype=torch.float64, device=device),
        )
        for column in zip(*padded, strict=True)
    )


@lru_cache(maxsize=64)
def own_weights(topology: Topology, phase: int = 0, device: torch.device = CPU) -> Tensor:
    """The weight that every rank gives itself. -> float64 [ranks, 1]."""
    own = [[1.0 - sum(dict(sorted(topology.peers(r, phase).items())).values())] for r in range(topology.size)]
    return torch.tensor(own, dtype=torch.float64, device=device)
