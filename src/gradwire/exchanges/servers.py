"""Shards: which stretch of a buffer each rank reduces."""

# The memory of a slice's owner: what its second leg did not send. Checkpoints have it under this name.
SERVER_ERROR = "served"

_EIGHT = 8  # codes of any width are whole bytes then, so that kernels serve a slice as it lies


def server_slice(n: int, world: int, rank: int) -> tuple[int, int]:
    """The stretch of an n-element buffer that a rank serves; the last ones may be short or empty."""
    each = -(-n // (world * _EIGHT)) * _EIGHT
    return min(rank * each, n), min((rank + 1) * each, n)
