"""What a dropped step has written, undone in one launch. In any other step its programs look at one bool, and leave."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.core.graph_refs import cached_on_device
from gradwire.kernels import conditional
from gradwire.kernels.cuda.launch import form, launch
from gradwire.kernels.cuda.places import moved
from gradwire.kernels.cuda.tables import definition, placed

_TILE = 4096
_PIECE = 1 << 18  # entries of a program: few programs where nothing is to be done, and enough where something is
_COLUMNS = tl.constexpr(3)  # addresses of what is written and of what it was, and how many entries


@triton.jit
def _write_if(pieces, dropped, COPIES: tl.constexpr, TILE: tl.constexpr):
    if tl.load(dropped) != 0:
        piece = pieces + tl.program_id(0) * _COLUMNS
        x = tl.load(piece).to(tl.pointer_type(tl.float32))
        before = tl.load(piece + 1).to(tl.pointer_type(tl.float32))
        n = tl.load(piece + 2).to(tl.int32)
        for start in range(0, n, TILE):
            at = start + tl.arange(0, TILE)
            known = tl.load(before + at, mask=at < n, other=0.0) if COPIES else tl.zeros([TILE], tl.float32)
            tl.store(x + at, known, mask=at < n)


@placed
def copy_if_(dropped: Tensor, now: Sequence[Tensor], before: Sequence[Tensor]) -> None:
    if all(map(_plain, (*now, *before))):
        _launch(dropped, now, before, True)
    else:
        definition(conditional.copy_if_)(dropped, now, before)


@placed
def zero_if_(dropped: Tensor, updates: Sequence[Tensor]) -> None:
    if all(map(_plain, updates)):
        _launch(dropped, updates, updates, False)
    else:
        definition(conditional.zero_if_)(dropped, updates)


def _plain(x: Tensor) -> bool:
    return x.is_contiguous() and x.dtype == torch.float32


def _launch(dropped: Tensor, now: Sequence[Tensor], before: Sequence[Tensor], copies: bool) -> None:
    places = tuple([(x.data_ptr(), old.data_ptr(), x.numel()) for x, old in zip(now, before, strict=True)])
    pieces = _pieces(places, dropped.device)
    fresh = (pieces, dropped)
    if len(pieces):
        launch(_write_if, len(pieces), (copies, *form(*fresh)), fresh, (copies, _TILE), num_warps=4)


@cached_on_device(256)
def _pieces(places: tuple[tuple[int, int, int], ...], device: torch.device) -> Tensor:
    """int64[pieces, columns]. Commits come to the same addresses again and again."""
    cuts = [(x, old, n, start) for x, old, n in places for start in range(0, n, _PIECE)]
    rows = [(x + 4 * start, old + 4 * start, min(_PIECE, n - start)) for x, old, n, start in cuts]
    return moved(torch.tensor(rows, dtype=torch.int64).view(-1, _COLUMNS.value), device)
