"""What a dropped step has written, undone. In any other step a few programs look at one bool, and leave."""

from collections.abc import Iterable, Sequence

import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels import conditional
from gradwire.kernels.cuda.launch import form, launch
from gradwire.kernels.cuda.tables import definition, placed

_TILE = 4096
_PROGRAMS = 256  # enough for the rare step that is dropped, and few for all others
_TOGETHER = 8  # tensors in a launch


@triton.jit
def _write(x, before, n, COPIES: tl.constexpr, TILE: tl.constexpr, PROGRAMS: tl.constexpr):
    lane = tl.program_id(0) * TILE + tl.arange(0, TILE).to(tl.int64)
    for start in range(0, n, PROGRAMS * TILE):
        at = start + lane
        known = tl.load(before + at, mask=at < n, other=0.0) if COPIES else tl.zeros([TILE], tl.float32)
        tl.store(x + at, known, mask=at < n)


@triton.jit
def _write_if(
    x0, x1, x2, x3, x4, x5, x6, x7, b0, b1, b2, b3, b4, b5, b6, b7, dropped, n0, n1, n2, n3, n4, n5, n6, n7,
    COPIES: tl.constexpr, TILE: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    if tl.load(dropped) != 0:
        _write(x0, b0, n0, COPIES, TILE, PROGRAMS)
        _write(x1, b1, n1, COPIES, TILE, PROGRAMS)
        _write(x2, b2, n2, COPIES, TILE, PROGRAMS)
        _write(x3, b3, n3, COPIES, TILE, PROGRAMS)
        _write(x4, b4, n4, COPIES, TILE, PROGRAMS)
        _write(x5, b5, n5, COPIES, TILE, PROGRAMS)
        _write(x6, b6, n6, COPIES, TILE, PROGRAMS)
        _write(x7, b7, n7, COPIES, TILE, PROGRAMS)


@placed
def copy_if_(dropped: Tensor, now: Sequence[Tensor], before: Sequence[Tensor]) -> None:
    if all(map(_plain, (*now, *before))):
        _launch(dropped, zip(now, before, strict=True), True)
    else:
        definition(conditional.copy_if_)(dropped, now, before)


@placed
def zero_if_(dropped: Tensor, updates: Sequence[Tensor]) -> None:
    if all(map(_plain, updates)):
        _launch(dropped, zip(updates, updates, strict=True), False)
    else:
        definition(conditional.zero_if_)(dropped, updates)


def _plain(x: Tensor) -> bool:
    return x.is_contiguous() and x.element_size() == 4 and x.is_floating_point()


def _launch(dropped: Tensor, pairs: Iterable[tuple[Tensor, Tensor]], copies: bool) -> None:
    """Write so many together; the last ones stand there twice, which does no harm."""
    pairs = [pair for pair in pairs if pair[0].numel()]
    for i in range(0, len(pairs), _TOGETHER):
        some = pairs[i : i + _TOGETHER]
        now, before = zip(*some, *[some[-1]] * (_TOGETHER - len(some)), strict=True)
        sizes = tuple([x.numel() for x in now])
        fresh = (*now, *before, dropped)
        programs = min(_PROGRAMS, triton.next_power_of_2(-(-max(sizes) // _TILE)))
        rest = (*sizes, copies, _TILE, programs)
        launch(_write_if, programs, (sizes, copies, *form(*fresh)), fresh, rest, num_warps=4)
