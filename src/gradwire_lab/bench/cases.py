"""Cases: every kernel as it is timed, and the bytes that it cannot avoid touching for each element.

Names that begin with ``torch_`` are compositions of torch's own calls; ``_turns`` and ``_lane`` say that memories are
kept until the step is committed, as a lane keeps them: read here and written there.
Everything else works in place.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.codecs.codec import Codec
from gradwire.codecs.quantizers import FP32
from gradwire.codecs.selectors.chunk_topk import ChunkTopK
from gradwire.codecs.stage import EncodeInput
from gradwire.core.keys import Key
from gradwire.core.requests import run
from gradwire.core.segments import Segments, on
from gradwire.exchanges.exchange import CommContext, Message
from gradwire.exchanges.powersgd import PowerSGD, basis_length, orthonormal
from gradwire.kernels import fused, quantize
from gradwire.kernels.dispatch import offers
from gradwire.kernels.rice import (
    decode_blocks,
    encode_blocks,
    find_bits,
    gaps_of,
    rice_decode,
    rice_encode,
    set_bits,
)
from gradwire.kernels.rows import decode_in_rows, encode_in_rows
from gradwire.kernels.select import permute
from gradwire_lab.bench import plain
from gradwire_lab.bench.kernel_inputs import RATIO, WORLD, Case, KernelInputs, Make, Run
from gradwire_lab.bench.momenta import MOMENTA
from gradwire_lab.bench.selections import SELECTIONS

_RANK = 4
_KEY = Key(seed=0, step=7, rank=0)
_INT_BLOCK = 256


def names(lengths: tuple[int, ...]) -> list[str]:
    """What can be timed on such segments."""
    return [name for name in CASES if len(lengths) == 1 or not name.startswith("torch_")]


def _chunk_topk(inputs: KernelInputs) -> Case:
    selector = ChunkTopK(4)
    signal = EncodeInput(inputs.x, inputs.x, {}, Segments(inputs.names, tuple((length,) for length in inputs.lengths)))
    return Case(4.0, lambda: selector.select(signal, _KEY), False)


def _torch(inputs: KernelInputs, needed: float, encode: Callable[[Tensor], object]) -> Case:
    x = inputs.x
    return Case(needed, lambda: encode(x), False, True)


# -- error feedback of dense codecs ------------------------------------------------------------------------------------


def _feedback(inputs: KernelInputs, bits: int, lane: bool) -> Case:
    """One bit is `sign`, whose scale is a segment's: it reads and writes the residual twice."""
    residual = inputs.normal()
    needed = 20.125 if bits == 1 else 12 + bits / 8 + 4 / _INT_BLOCK

    spare = torch.empty_like(residual) if lane else residual

    def encode(memory: Tensor, before: Tensor | None = None) -> None:
        if bits == 1:
            fused.feedback_sign_(inputs.x, memory, 1.0, inputs.lengths, False, before)
        else:
            fused.feedback_integer_(inputs.x, memory, 1.0, inputs.lengths, bits, _INT_BLOCK, before)

    def commit() -> None:
        nonlocal residual, spare
        encode(spare, residual)
        residual, spare = spare, residual

    return Case(needed, commit, False) if lane else Case(needed, lambda: encode(residual))


# -- coders ------------------------------------------------------------------------------------------------------------


class Coder(NamedTuple):
    """Both ways of a dense codec, and the bytes of an element each way."""

    encoding: float
    decoding: float
    encode: Callable[[KernelInputs], Tensor]
    decode: Callable[[KernelInputs, Tensor], Tensor]


def _integer(bits: int) -> Coder:
    needed = 4 + bits / 8 + 4 / _INT_BLOCK
    return Coder(
        needed,
        needed,
        lambda s: quantize.integer_encode(s.x, s.table, bits, _INT_BLOCK),
        lambda s, data: quantize.integer_decode(data, s.table, bits, _INT_BLOCK),
    )


def _qsgd(bucket: int | None, encoding: float) -> Coder:
    return Coder(
        encoding,
        5.0 + (4 / bucket if bucket else 0),
        lambda s: quantize.qsgd_encode(s.x, s.table, s.names, _KEY, 127, bucket),
        lambda s, data: quantize.qsgd_decode(data, s.table, 127, bucket, False),
    )


def _cast(dtype: torch.dtype) -> Coder:
    return Coder(6.0, 6.0, lambda s: quantize.cast_encode(s.x, dtype), lambda s, data: quantize.cast_decode(data))


CODERS: dict[str, Coder] = {
    "sign": Coder(
        4.125,
        4.125,
        lambda s: quantize.sign_encode(s.x, s.table, False),
        lambda s, data: quantize.sign_decode(data, s.table),
    ),
    "onebit": Coder(
        4.125,
        4.125,
        lambda s: quantize.onebit_encode(s.x, s.table),
        lambda s, data: quantize.onebit_decode(data, s.table),
    ),
    "qsgd": _qsgd(512, 5 + 4 / 512),
    "qsgd_whole": _qsgd(None, 9.0),
    "terngrad": Coder(
        8.2,
        4.2,
        lambda s: quantize.ternary_encode(s.x, s.table, s.names, _KEY, 2.5),
        lambda s, data: quantize.ternary_decode(data, s.table),
    ),
    "natural": Coder(
        5.125,
        5.125,
        lambda s: quantize.natural_encode(s.x, s.table, s.names, _KEY),
        lambda s, data: quantize.natural_decode(data, s.n),
    ),
    "fp16": _cast(torch.float16),
    "bf16": _cast(torch.bfloat16),
    **{f"int{bits}": _integer(bits) for bits in (8, 4, 2)},
}


def _encode(inputs: KernelInputs, coder: Coder) -> Case:
    return Case(coder.encoding, lambda: coder.encode(inputs))


def _decode(inputs: KernelInputs, coder: Coder) -> Case:
    data = coder.encode(inputs)
    return Case(coder.decoding, lambda: coder.decode(inputs, data))


# -- sparse messages ---------------------------------------------------------------------------------------------------


def _draw(inputs: KernelInputs) -> Case:
    sizes, counts = on(inputs.lengths, inputs.device), inputs.counts(RATIO)
    return Case(8 * RATIO, lambda: permute(sizes, inputs.names, _KEY, inputs.lengths, counts))


def _scatter_mean(inputs: KernelInputs) -> Case:
    values, indices, bounds = inputs.messages
    return Case(4.0, lambda: fused.scatter_mean(values, indices, bounds, inputs.n, WORLD))


def _scatter_mean_there(inputs: KernelInputs) -> Case:
    """Into a vector that is there, where gradients lie."""
    out = torch.empty(inputs.n, device=inputs.device)
    return Case(4.0, lambda: fused.scatter_mean_(out, *inputs.messages, 0, WORLD))


def _rice(inputs: KernelInputs, decoding: bool) -> Case:
    """Positions, or, where the device has no kernel for those, their gaps."""
    places, n = inputs.positions(), inputs.n
    if offers(inputs.device.type, "rice_encode"):
        row = rice_encode(places, n)[0][None]
        ways: tuple[Run, Run] = partial(rice_encode, places, n), partial(rice_decode, row, places.numel(), n)
        return Case(2 * RATIO, ways[decoding])
    gaps = gaps_of(places)
    data = encode_blocks(gaps, 4)
    ways = partial(encode_blocks, gaps, 4), partial(decode_blocks, data, gaps.numel(), 4)
    return Case(2 * RATIO, ways[decoding], False)


def _rows(inputs: KernelInputs, decoding: bool) -> Case:
    """Positions in rows of 1024."""
    places = inputs.positions()
    runs = tuple(run for length in inputs.lengths for run in ((length // 1024, 1024), (1, length % 1024)))
    data = encode_in_rows(places, runs)
    ways: tuple[Run, Run] = partial(encode_in_rows, places, runs), partial(decode_in_rows, data, places.numel(), runs)
    return Case(2 * RATIO, ways[decoding], False, not offers(inputs.device.type, "encode_in_rows"))


def _bitmap(inputs: KernelInputs, decoding: bool) -> Case:
    places, n = inputs.positions(), inputs.n
    ways: tuple[Run, Run] = partial(set_bits, places, n), partial(find_bits, set_bits(places, n))
    return Case(0.125 + 8 * RATIO, ways[decoding], False, True)


def _merge(inputs: KernelInputs, bits: int) -> Case:
    """A server's turn with messages of several ranks for its slice, a debt, and one message back."""
    n = max(inputs.n // WORLD // 8 * 8, 8)
    x, debt = torch.randn(n, device=inputs.device), torch.randn(n, device=inputs.device)
    table = torch.tensor([n], device=inputs.device)
    # Bytes of each element of the whole vector, of which this is one slice.
    if bits == 1:
        rows = quantize.sign_encode(x, table, False).repeat(WORLD, 1)
        return Case((WORLD / 8 + 16 + 1 / 8) / WORLD, lambda: fused.merge_sign(rows, debt, (n,), False))
    rows = quantize.integer_encode(x, table, bits, _INT_BLOCK).repeat(WORLD, 1)
    code = bits / 8 + 4 / _INT_BLOCK
    needed = (WORLD * code + 8 + code) / WORLD
    return Case(needed, lambda: fused.merge_integer(rows, debt, (n,), bits, _INT_BLOCK))


# -- PowerSGD ----------------------------------------------------------------------------------------------------------


def _powersgd(inputs: KernelInputs) -> Case:
    """All that one rank computes in a step: three products of each matrix, of which the last is made twice."""
    tensors = Segments(inputs.names, tuple(map(_shape, inputs.lengths)))
    exchange, around = PowerSGD(_RANK), CommContext(_KEY, 1, tensors, tensors, True)
    length = sum(basis_length(shape, _RANK) for shape in tensors.shapes)
    memory = {"basis": torch.zeros(length, device=inputs.device)}

    def step() -> None:
        nonlocal memory
        generator = exchange.run(Message(inputs.x, None, memory), Codec.of((FP32(),)), around)
        memory = dict(run(generator, lambda request: request.tensor).memory)  # type: ignore[union-attr]

    return Case(16.0, step, False, True)


def _orthonormal(inputs: KernelInputs) -> Case:
    """The share of it that is not a product, of the longest matrix."""
    rows = _shape(max(inputs.lengths))[0]
    p = torch.randn(1, rows, _RANK, device=inputs.device)
    return Case(8 * p.numel() / inputs.n, lambda: orthonormal(p), True, True)


def _shape(n: int) -> tuple[int, ...]:
    """A matrix of so many elements that is as square as its powers of two allow."""
    rows = math.gcd(n, 2 ** (math.isqrt(n).bit_length() - 1))
    return (rows, n // rows) if rows > 1 else (n,)


CASES: dict[str, Make] = {
    **SELECTIONS,
    **MOMENTA,
    "chunk_topk": _chunk_topk,
    **{
        f"feedback_{name}{suffix}": partial(_feedback, bits=bits, lane=bool(suffix))
        for name, bits in (("sign", 1), ("int8", 8), ("int4", 4), ("int2", 2))
        for suffix in ("", "_lane")
    },
    "torch_sign": lambda s: _torch(s, 4.125, plain.sign),
    "torch_qsgd": lambda s: _torch(s, 5 + 4 / 512, plain.qsgd),
    "torch_int4": lambda s: _torch(s, 4.5 + 4 / _INT_BLOCK, plain.int4),
    **{
        f"{name}_{way}": partial(make, coder=coder)
        for name, coder in CODERS.items()
        for way, make in (("encode", _encode), ("decode", _decode))
    },
    "draw": _draw,
    f"scatter_mean_{WORLD}": _scatter_mean,
    f"scatter_mean_there_{WORLD}": _scatter_mean_there,
    "rice_encode": partial(_rice, decoding=False),
    "rice_decode": partial(_rice, decoding=True),
    "rows_encode": partial(_rows, decoding=False),
    "rows_decode": partial(_rows, decoding=True),
    "bitmap_encode": partial(_bitmap, decoding=False),
    "bitmap_decode": partial(_bitmap, decoding=True),
    **{
        f"merge_{name}_{WORLD}": partial(_merge, bits=bits)
        for name, bits in (("int8", 8), ("int4", 4), ("int2", 2), ("sign", 1))
    },
    "powersgd": _powersgd,
    "powersgd_orthonormal": _orthonormal,
}
