"""Columns: the first neighbor of every rank, then the second, and so on, so that all ranks mix at once."""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.topology import Topology

CPU = torch.device("cpu")


class Column(NamedTuple):
    """One neighbor of every rank.

    Attributes:
        peers: int64 [ranks].
        weights: float64 [ranks, 1].
    """

    peers: Tensor
    weights: Tensor


@lru_cache(maxsize=64)
def columns(topology: Topology, turn: int = 0, device: torch.device = CPU) -> tuple[Column, ...]:
    """Neighbors in one round of a period, by rising rank. Who has fewer than others hears himself, with weight zero."""
    peers = [sorted(topology.peers(rank, turn).items()) for rank in range(topology.size)]
    most = max(map(len, peers))
    padded = [row + [(rank, 0.0)] * (most - len(row)) for rank, row in enumerate(peers)]
    return tuple(
        Column(
            torch.tensor([peer for peer, _ in column], device=device),
            torch.tensor([[weight] for _, weight in column], dtype=torch.float64, device=device),
        )
        for column in zip(*padded, strict=True)
    )


@lru_cache(maxsize=64)
def own_weights(topology: Topology, turn: int = 0, device: torch.device = CPU) -> Tensor:
    """What every rank keeps of its own. -> float64 [ranks, 1]."""
    kept = [[1.0 - sum(dict(sorted(topology.peers(r, turn).items())).values())] for r in range(topology.size)]
    return torch.tensor(kept, dtype=torch.float64, device=device)
