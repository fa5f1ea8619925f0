"""Where vectors lie that are in pieces: a table of addresses, one for each block or tile that a program works on."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.core.graph_refs import cached_on_device
from gradwire.core.layout import Flat, Scattered, in_one_place
from gradwire.kernels.groups import before

TOGETHER = tl.constexpr(0)  # a vector lies end to end: kernels get its address
PIECES = tl.constexpr(1)  # kernels get a table of addresses,
ALIGNED = tl.constexpr(2)  # all of which are multiples of 16 bytes

Spans = tuple[tuple[int, int], ...]  # address and length of each piece


@triton.jit
def place_of(x, number, start, HOW: tl.constexpr):
    """Where block ``number`` of a vector lies, which begins at ``start``."""
    if HOW == TOGETHER:
        return x + start
    else:
        place = tl.load(x + number).to(tl.pointer_type(tl.float32))
        return tl.multiple_of(place, 16) if HOW == ALIGNED else place


@triton.jit
def origin_of(x, at, HOW: tl.constexpr, TILE: tl.constexpr):
    """The pointers to which positions are to be added: one for all, or one for each."""
    if HOW == TOGETHER:
        return x
    else:
        tile = at // TILE
        return tl.load(x + tile).to(tl.pointer_type(tl.float32)) - tile * TILE


def by_block(x: Flat, lengths: tuple[int, ...]) -> tuple[Tensor, int] | None:
    """What kernels are handed of a vector, and how it lies; None if blocks of these lengths lie in several pieces."""
    return (x, int(TOGETHER.value)) if isinstance(x, Tensor) else _table(_spans(x), lengths, 0, x.device)


def by_tile(x: Flat, tile: int) -> tuple[Tensor, int] | None:
    """The same, of tiles: all blocks have one length, but for the last."""
    return (x, int(TOGETHER.value)) if isinstance(x, Tensor) else _table(_spans(x), (), tile, x.device)


def end_to_end(x: Flat) -> tuple[Tensor, int]:
    """The same of a vector that is laid end to end, by a copy if it lies in pieces."""
    return in_one_place(x), int(TOGETHER.value)


def vector_of(place: tuple[Tensor, int]) -> Tensor | None:
    """The vector itself, if that is what kernels are handed; None for a table of its pieces."""
    return place[0] if place[1] == TOGETHER.value else None


def _spans(x: Scattered) -> Spans:
    return tuple([(part.data_ptr(), part.numel()) for part in x.parts])


@cached_on_device(2**16)
def _table(spans: Spans, lengths: tuple[int, ...], tile: int, device: torch.device) -> tuple[Tensor, int] | None:
    """int64[blocks]. There is one for each bucket, and for each rank's slice of it, as long as a wire lives."""
    address, size = torch.tensor(spans).unbind(1)
    ends = size.cumsum(0)
    starts = torch.arange(0, int(ends[-1]), tile) if tile else before(torch.tensor(lengths))
    stops = (starts + tile).clamp(max=int(ends[-1])) if tile else starts + torch.tensor(lengths)
    piece = torch.searchsorted(ends, starts, right=True).clamp(max=len(spans) - 1)
    if bool((stops > ends[piece]).any()):
        return None
    places = address[piece] + 4 * (starts - before(size)[piece])
    aligned = not bool((places % 16).any())
    return moved(places, device), int((ALIGNED if aligned else PIECES).value)


def moved(x: Tensor, device: torch.device) -> Tensor:
    """Copied without waiting for the device."""
    if device.type != "cuda":
        return x
    if torch.cuda.is_current_stream_capturing():
        # The graph would read the host's memory at every replay.
        raise RuntimeError("a table of addresses is made by eager steps, before a capture")
    return x.pin_memory().to(device, non_blocking=True)
