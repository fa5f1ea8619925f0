"""Rice: gaps in Golomb-Rice codes, with a parameter of its own for every 512 of them.

Paper:    Golomb, "Run-length encodings", IEEE Trans. Information Theory 1966; Rice and Plaunt,
          "Adaptive variable-length coding", IEEE Trans. Communication Technology 1971. For
          gradients: Sattler et al., "Robust and communication-efficient federated learning from
          non-i.i.d. data", IEEE TNNLS 2020. https://arxiv.org/abs/1903.02891
Formula:  g_1 = i_1,  g_j = i_j - i_(j-1) - 1;  g is sent as g >> b in unary and b low bits;
          each block of 512 gaps takes the b that makes it shortest; where that is shorter still,
          a block caps the unary part at 8 and sends the rest of longer gaps apart
Wire:     bit by bit in kernels/rice.py
          header      2 bytes a block: b in 5 bits, capped or not in 1, the block's unary in 10
          quotients   g >> b zeros and a one for each gap
          remainders  b bits for each gap
          escapes     ceil(log2(n) / 8) bytes for each gap beyond the cap
          total       1.005 to 1.02 log2 C(n, k) bits on random supports of 2 % and less, far
                      fewer on clustered ones;
                      2 ceil(k/512) + (min_b k(b+1) + ((n-k) >> b) + 14) div 8 bytes at most
Traits:   exact; length varies with the support, unless static: then zeros fill the room of the longest
Differs:  the parameter is the best for each block, not computed from the density k/n; blocks may
          be capped; quotients and remainders travel apart, so that all codes decode in parallel.
Spec:     rice, rice(static=True)
"""

import torch
from torch import Tensor

from gradwire.codecs.stage import IndexCoder
from gradwire.core import check_argument, register
from gradwire.core.payload import first_bytes
from gradwire.kernels import rice
from gradwire.kernels.dispatch import offers


@register("rice", kind="indices")
class Rice(IndexCoder):
    """Entropy-coded gaps: within 2 % of the fewest bytes a random support can take.

    Attributes:
        static: Whether all messages take the room of the longest, so that no length has to be waited for.
    """

    static: bool = False
    examples = ("rice", "rice(static=True)")

    def __post_init__(self) -> None:
        check_argument(self, "static", isinstance(self.static, bool), "True or False")

    @property
    def fixed(self) -> bool:  # type: ignore[override]
        return self.static

    def size(self, count: int, n: int) -> int:
        _check_length(n)
        return rice.most_bytes(count, n - count)

    def encode(self, indices: Tensor, n: int) -> Tensor:
        _check_length(n)
        if self.static or offers(indices.device.type, "rice_encode"):
            data, used = rice.rice_encode(indices, n)
            return data if self.static else data[: int(used)]
        return rice.encode_blocks(rice.gaps_of(indices), rice.width_of(n))

    def measure(self, indices: Tensor, n: int) -> Tensor:
        _check_length(n)
        return rice.rice_encode(indices, n)[1]

    def decode(self, data: Tensor, count: int, n: int) -> tuple[Tensor, int]:
        if not self.static:
            return self._decode(data, count, n)
        room = self.size(count, n)
        return self._decode(first_bytes(data, room, f"the list of {count} rice codes"), count, n)[0], room

    def _decode(self, data: Tensor, count: int, n: int) -> tuple[Tensor, int]:
        found = self.decode_rows(data[None], count, n)
        if found is not None:
            used, fault = torch.cat((found.used, found.faults.any().long()[None])).tolist()
            if not fault:
                return found.indices[0], used
        gaps, used = rice.decode_blocks(data, count, rice.width_of(n))
        return (gaps + 1).cumsum(0) - 1, used

    def decode_rows(self, rows: Tensor, count: int, n: int) -> rice.Found | None:
        return rice.rice_decode(rows, count, n) if offers(rows.device.type, "rice_decode") else None


def _check_length(n: int) -> None:
    if n > rice.LIMIT:
        raise ValueError(f"rice cannot name all positions of {n} elements; use int64 instead")
