"""The mean over ranks whose vectors lie in one buffer, rank after rank, in plain torch."""

from collections.abc import Sequence

from torch import Tensor

from gradwire.kernels.fused import scatter_mean
from gradwire.kernels.groups import over, over_senders


def rank_mean(values: Tensor, indices: Tensor | None, starts: Sequence[int], n: int, world: int) -> Tensor:
    """The mean of what all ranks sent, added in their order, as messages are when they are decoded one by one.

    Args:
        values: Of all ranks.
        indices: Their rising positions in the buffer of world * n entries; None: every position.
        starts: Where the entries of each unit of all ranks begin in ``values``, and where the last ones end.
        n: The length of a rank's vector.
        world: Number of ranks.
    """
    if indices is not None and indices.numel() <= n:
        by_rank = tuple(starts[:: (len(starts) - 1) // world])
        return scatter_mean(values, indices % n, by_rank, n, world)
    if indices is not None:  # together longer than the vector: zeros in between cost less
        values = values.new_zeros(world * n).index_copy_(0, indices, values)
    total = values.new_zeros(n)
    for row in values.view(world, n):
        total += row
    return over(total, world)


def senders_mean(values: Tensor, indices: Tensor, starts: Sequence[int], n: int, world: int) -> Tensor:
    """`rank_mean` of sparse messages, but of each entry over those ranks that sent it."""
    by_rank, places = tuple(starts[:: (len(starts) - 1) // world]), indices % n
    return over_senders(scatter_mean(values, places, by_rank, n, 1), places)
