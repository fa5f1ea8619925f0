"""Rows: how many positions each row of a weight has, then gaps in codes which that number suggests.

Paper:    none; Golomb-Rice codes (see rice), with the row of a weight as their context.
Formula:  a row with c positions among its w has b = floor(log2((w - c) / (c + 1))), at least 0;
          a gap g, counted from the row's beginning, is sent as g >> b in unary and b low bits.
          Rows are joined until they are 2**floor(log2(n / 2k)) wide; what is not a matrix is one row
Wire:     named       4 bytes: how many rows are named, all or those that have positions
          empty       rows passed over before each that is named, unless all are; Rice's blocks
          counts      positions of each named row, less one unless all are named; Rice's blocks
          quotients   g >> b zeros and a one for each gap
          remainders  b bits for each gap
          total       measured at 0.1 %: 0.7 to 0.99 log2 C(n, k) bits on convolutions, 0.5 to 0.75
                      on an LSTM; 1.05 on random supports; log2 C(n, k) + 3k or so at most
Traits:   exact; length varies with the support.
Differs:  no paper to differ from. Positions of a gradient are not spread evenly over outputs: what
          one learns, another does not, and codes of gaps alone cannot know where a row ends.
Spec:     rows
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from torch import Tensor

from gradwire.codecs.stage import IndexCoder
from gradwire.core.registry import register
from gradwire.core.segments import Segments
from gradwire.kernels.rows import Runs, decode_in_rows, encode_in_rows, most_bytes_of_rows


@register("rows", kind="indices")
@dataclass(frozen=True)
class Rows(IndexCoder):
    """Gaps row by row: below what a random support takes, where rows of a weight differ."""

    fixed = False
    examples: ClassVar[tuple[str, ...]] = ("rows",)

    def over(self, table: Segments) -> IndexCoder:
        return _over(table.rows)

    def size(self, count: int, n: int) -> int:
        return most_bytes_of_rows(count, self._runs(n))

    def encode(self, indices: Tensor, n: int) -> Tensor:
        return encode_in_rows(indices, self._runs(n))

    def decode(self, data: Tensor, count: int, n: int) -> tuple[Tensor, int]:
        return decode_in_rows(data, count, self._runs(n))

    def _runs(self, n: int) -> Runs:
        return ((1, n),)


@dataclass(frozen=True)
class _RowsOf(Rows):
    """The same for a table with these rows."""

    runs: Runs = ()

    def _runs(self, n: int) -> Runs:
        assert n == sum(rows * width for rows, width in self.runs)
        return self.runs


@lru_cache(maxsize=256)
def _over(runs: Runs) -> IndexCoder:
    return _RowsOf(runs)
