"""Checks: what stages of one's own return is checked before anything else relies on it.

The package's own stages are tested instead. Index coders assume positions that rise. Of others they would write bytes
without end, or bytes that no receiver can read.
"""

import torch
from torch import Tensor

from gradwire.codecs.stage import Quantizer, Selector, Stage
from gradwire.core import Segments


def is_of_package(stage: Stage) -> bool:
    """Whether the package has this stage."""
    return type(stage).__module__.startswith("gradwire.")


def check_capacity(selector: Selector, n: int) -> int:
    """``selector.capacity(n)``.

    Raises:
        ValueError: A segment has not so many entries.
    """
    most = selector.capacity(n)
    if not 0 <= most <= n:
        raise ValueError(
            f"{selector} may send {most} entries of a segment of length {n}, by its capacity({n}); "
            "return at most n, and so 0 for an empty segment"
        )
    return most


def check_positions(selector: Selector, indices: Tensor, table: Segments, capacities: tuple[int, ...]) -> None:
    """Positions rise, lie in the buffer, and are as many in each segment as may be.

    Nothing is read from a GPU, which would wait for it.

    Raises:
        ValueError: They are not; the message names the selector and the first wrong position.
    """
    if is_of_package(selector) or indices.device.type != "cpu":
        return
    _check_rising(selector, indices, table)
    counts = torch.searchsorted(indices, table.offsets_on(indices.device)).diff().tolist()
    for name, n, count, most in zip(table.names, table.lengths, counts, capacities, strict=True):
        if count > most or (count < most and selector.traits.fixed):
            limit = f"its capacity({n}) is {most}" + (" and its traits are fixed" if count < most else "")
            raise ValueError(f"{selector} selected {count} positions of {name!r}, a segment of length {n}, but {limit}")


def _check_rising(selector: Selector, indices: Tensor, table: Segments) -> None:
    if indices.dtype != torch.int64 or indices.dim() != 1:
        raise ValueError(
            f"{selector} selected a tensor of {indices.dtype} and shape {tuple(indices.shape)}; "
            "return flat int64 positions"
        )
    outside = indices[(indices < 0) | (indices >= table.total)]
    if outside.numel():
        raise ValueError(
            f"{selector} selected position {int(outside[0])} of a buffer of length {table.total}; "
            f"its segments are {table.lengths} long"
        )
    falls = (indices[1:] <= indices[:-1]).nonzero().flatten()
    if falls.numel():
        before, after = indices[falls[0]], indices[falls[0] + 1]
        raise ValueError(f"{selector} selected position {int(after)} after {int(before)}; positions must rise")


def check_body(quantizer: Quantizer, body: Tensor, counts: tuple[int, ...]) -> None:
    """Values take as many bytes as `Quantizer.size` says, which is where receivers cut messages.

    Raises:
        ValueError: They do not.
    """
    if is_of_package(quantizer):
        return
    if body.dtype != torch.uint8 or body.dim() != 1:
        raise ValueError(
            f"{quantizer}: encode wrote a tensor of {body.dtype} and shape {tuple(body.shape)}; return flat uint8"
        )
    size = quantizer.size(counts)
    if body.numel() != size:
        some = f"{counts[:8]}{' and so on' if len(counts) > 8 else ''}"
        raise ValueError(
            f"{quantizer}: size() says {size} bytes, encode wrote {body.numel()}, for segments of {some} values; "
            "make them equal"
        )
