"""Packing small codes into bytes, without a bit of waste inside and less than a byte at the end.

Code j occupies bits [j*b, (j+1)*b) of the stream, least significant bit first; bit i of the stream is bit i mod 8 of
byte i div 8.
"""

import torch
from torch import Tensor


def packed_bytes(count: int, bits: int) -> int:
    """How many bytes ``count`` codes of ``bits`` bits take."""
    return (count * bits + 7) // 8


def pack(codes: Tensor, bits: int) -> Tensor:
    """Unsigned codes below 2**bits, as bytes. [m] -> uint8[ceil(m * bits / 8)]."""
    if bits == 8:
        return codes.to(torch.uint8)
    m = codes.numel()
    wide = codes.new_zeros((m + 7) // 8 * 8, dtype=torch.int32)
    wide[:m] = codes
    place = torch.arange(bits, dtype=torch.int32, device=codes.device)
    stream = (wide[:, None] >> place & 1).to(torch.uint8).view(-1, 8)  # [m * bits / 8, 8]
    weight = torch.tensor([1 << i for i in range(8)], dtype=torch.uint8, device=codes.device)
    return (stream * weight).sum(1, dtype=torch.uint8)[: packed_bytes(m, bits)]


def unpack(data: Tensor, bits: int, count: int) -> Tensor:
    """The first ``count`` codes of a packed stream, as int32."""
    if bits == 8:
        return data[:count].int()
    rows = (count + 7) // 8
    wide = data.new_zeros(rows * bits)
    wide[: data.numel()] = data[: rows * bits]
    place = torch.arange(8, dtype=torch.uint8, device=data.device)
    stream = (wide[:, None] >> place & 1).view(rows * 8, bits).int()
    weight = torch.tensor([1 << i for i in range(bits)], dtype=torch.int32, device=data.device)
    return (stream * weight).sum(1, dtype=torch.int32)[:count]


def pack_trits(trits: Tensor) -> Tensor:
    """Digits 0, 1, 2, five to a byte: 1.6 bits each. [m] -> uint8[ceil(m / 5)]."""
    wide = trits.new_zeros((trits.numel() + 4) // 5 * 5, dtype=torch.int32)
    wide[: trits.numel()] = trits
    weight = torch.tensor([1, 3, 9, 27, 81], dtype=torch.int32, device=trits.device)
    return (wide.view(-1, 5) * weight).sum(1).to(torch.uint8)


def unpack_trits(data: Tensor, count: int) -> Tensor:
    """The first ``count`` digits of a stream of trits, as int32."""
    weight = torch.tensor([1, 3, 9, 27, 81], dtype=torch.int32, device=data.device)
    return (data.int()[:, None] // weight % 3).flatten()[:count]
