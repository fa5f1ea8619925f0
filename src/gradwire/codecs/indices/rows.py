"""Rows: how many positions each row of a weight has, then gaps in codes which that number suggests.

Paper:    none; Golomb-Rice codes (see rice), with the row of a weight as their context.
Formula:  a row with c positions among its w has b = floor(log2((w - c) / (c + 1))), at least 0;
          a gap g, counted from the row's beginning, is sent as g >> b in unary and b low bits.
          Rows are joined until they are 2**floor(log2(n / 16k)) wide; what is no matrix is one row
Wire:     form        1 byte: 0 for what follows here, 1 for codes as rice's, if those are shorter
          named       4 bytes: how many rows are named, all or those that have positions
          empty       rows passed over before each that is named, unless all are; Rice's blocks
          counts      positions of each named row, less one unless all are named; Rice's blocks
          quotients   g >> b zeros and a one for each gap
          remainders  b bits for each gap
          total       measured at 0.1 %: 0.7 to 0.99 log2 C(n, k) bits on convolutions, 0.5 to 0.75
                      on an LSTM; a byte more than rice at most
Traits:   exact; length varies with the support.
Differs:  no paper to differ from. Positions of a gradient are not spread evenly over outputs: what
          one learns, another does not, and codes of gaps alone cannot know where a row ends.
Spec:     rows
"""

from dataclasses import field
from functools import lru_cache

import torch
from torch import Tensor

from gradwire.codecs.indices.rice import Rice
from gradwire.codecs.stage import IndexCoder
from gradwire.core import CorruptMessageError, Segments, register
from gradwire.kernels.rows import Runs, decode_in_rows, encode_in_rows, narrow_enough

_IN_ROWS, _AS_RICE = 0, 1
_RICE = Rice()


@register("rows", kind="indices")
class Rows(IndexCoder):
    """Gaps row by row; below what a random support takes where rows of a weight differ, else as Rice codes."""

    fixed = False
    examples = ("rows",)
    _bound_to: Runs | None = field(default=None, init=False, repr=False)

    def bind(self, table: Segments) -> IndexCoder:
        return _bound(table.rows)

    def size(self, count: int, n: int) -> int:
        return 1 + _RICE.size(count, n) if count else 0

    def encode(self, indices: Tensor, n: int) -> Tensor:
        if indices.numel() == 0:
            return indices.new_zeros(0, dtype=torch.uint8)
        form, coded, runs = _AS_RICE, _RICE.encode(indices, n), self._runs(n)
        if narrow_enough(runs, indices.numel()):
            in_rows = encode_in_rows(indices, runs)
            form, coded = (form, coded) if coded.numel() < in_rows.numel() else (_IN_ROWS, in_rows)
        return torch.cat((coded.new_full((1,), form), coded))

    def decode(self, data: Tensor, count: int, n: int) -> tuple[Tensor, int]:
        if count == 0:
            return data.new_zeros(0, dtype=torch.int64), 0
        form, runs = int(data[0]) if data.numel() else None, self._runs(n)
        if form == _AS_RICE:
            indices, used = _RICE.decode(data[1:], count, n)
        elif form == _IN_ROWS and narrow_enough(runs, count):
            indices, used = decode_in_rows(data[1:], count, runs)
        else:
            raise CorruptMessageError(f"there is no form {form} of positions; the message was cut or damaged")
        return indices, 1 + used

    def warm_up(self) -> None:
        decode_in_rows(encode_in_rows(torch.arange(3), ((2, 8),)), 3, ((2, 8),))  # few positions are coded as gaps

    def _runs(self, n: int) -> Runs:
        assert self._bound_to is None or n == sum(rows * width for rows, width in self._bound_to)
        return ((1, n),) if self._bound_to is None else self._bound_to


@lru_cache(maxsize=256)
def _bound(runs: Runs) -> IndexCoder:
    coder = Rows()
    object.__setattr__(coder, "_bound_to", runs)
    return coder
