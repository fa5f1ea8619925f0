"""Cases: every kernel as it is timed, and the bytes that it cannot avoid touching for each element.

Names that begin with ``torch_`` are compositions of torch's own calls; ``_turns`` and ``_lane`` say that memories are
kept until the step is committed, as a lane keeps them: read here and written there.
Everything else works in place.
"""

import math
from functools import partial

import torch
from torch import Tensor

from gradwire.codecs.codec import Codec
from gradwire.codecs.quantizers import BF16, FP16, FP32, QSGD, Int2, Int4, Int8, Natural, OneBit, Sign, TernGrad
from gradwire.codecs.selectors.chunk_topk import ChunkTopK
from gradwire.codecs.stage import EncodeInput, Quantizer
from gradwire.core.keys import Key
from gradwire.core.requests import run
from gradwire.core.segments import Segments
from gradwire.exchanges.exchange import CommContext, Message
from gradwire.exchanges.powersgd import PowerSGD, basis_length, orthonormal
from gradwire.kernels import fused, rice
from gradwire.kernels.dispatch import offers
from gradwire.kernels.rows import decode_in_rows, encode_in_rows
from gradwire.kernels.select import permute
from gradwire_lab.bench import plain
from gradwire_lab.bench.kernel_inputs import RATIO, WORLD, Case, KernelInputs, Make, Run, on_memory
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


# -- dense codecs ------------------------------------------------------------------------------------------------------

QUANTIZERS: dict[str, Quantizer] = {
    "sign": Sign(),
    "onebit": OneBit(),
    "qsgd": QSGD(),
    "qsgd_whole": QSGD(bucket=None),
    "terngrad": TernGrad(),
    "natural": Natural(),
    "fp16": FP16(),
    "bf16": BF16(),
    "int8": Int8(_INT_BLOCK),
    "int4": Int4(_INT_BLOCK),
    "int2": Int2(_INT_BLOCK),
}
_TWICE = ("qsgd_whole", "terngrad")  # a scale of the whole segment comes first


def _code(inputs: KernelInputs, name: str, decoding: bool) -> Case:
    quantizer, around = QUANTIZERS[name], (inputs.table, inputs.names, _KEY)
    message = quantizer.size(inputs.lengths) / inputs.n
    if not decoding:
        return Case(message + (8 if name in _TWICE else 4), lambda: quantizer.encode(inputs.x, *around))
    data = quantizer.encode(inputs.x, *around)
    return Case(message + 4, lambda: quantizer.decode(data, *around))


def _feedback(inputs: KernelInputs, name: str, lane: bool) -> Case:
    """The scale of `sign` is a segment's: it reads and writes the residual twice."""
    quantizer = QUANTIZERS[name]
    needed = (20 if name == "sign" else 12) + quantizer.size(inputs.lengths) / inputs.n
    kernel = quantizer.feedback_kernel
    assert kernel is not None

    def encode(memory: Tensor, before: Tensor | None = None) -> None:
        kernel(inputs.x, memory, 1.0, inputs.lengths, before=before)

    return on_memory(needed, encode, inputs.normal(), lane)


def _merge(inputs: KernelInputs, name: str) -> Case:
    """A server's turn with messages of several ranks for its slice, a debt, and one message back."""
    n, quantizer = max(inputs.n // WORLD // 8 * 8, 8), QUANTIZERS[name]
    x, debt = torch.randn(n, device=inputs.device), torch.randn(n, device=inputs.device)
    rows = quantizer.encode(x, torch.tensor([n], device=inputs.device), ("0",), _KEY).repeat(WORLD, 1)
    merge = quantizer.merge
    assert merge is not None
    # Bytes of each element of the whole vector, of which this is one slice.
    needed = ((WORLD + 1) * quantizer.size((n,)) / n + (16 if name == "sign" else 8)) / WORLD
    return Case(needed, lambda: merge(rows, debt, (n,)))


# -- sparse messages ---------------------------------------------------------------------------------------------------


def _draw(inputs: KernelInputs) -> Case:
    counts = inputs.counts(RATIO)
    return Case(8 * RATIO, lambda: permute(inputs.table, inputs.names, _KEY, inputs.lengths, counts))


def _scatter_mean_there(inputs: KernelInputs) -> Case:
    """Into a vector that is there, where gradients lie."""
    out = torch.empty(inputs.n, device=inputs.device)
    return Case(4.0, lambda: fused.scatter_mean_(out, *inputs.messages, WORLD))


def _rice(inputs: KernelInputs, decoding: bool) -> Case:
    """Positions, or, where the device has no kernel for those, their gaps."""
    places, n = inputs.positions(), inputs.n
    if offers(inputs.device.type, "rice_encode"):
        row = rice.rice_encode(places, n)[0][None]
        ways: tuple[Run, Run] = partial(rice.rice_encode, places, n), partial(rice.rice_decode, row, places.numel(), n)
        return Case(2 * RATIO, ways[decoding])
    gaps = rice.gaps_of(places)
    data = rice.encode_blocks(gaps, 4)
    ways = partial(rice.encode_blocks, gaps, 4), partial(rice.decode_blocks, data, gaps.numel(), 4)
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
    ways: tuple[Run, Run] = partial(rice.set_bits, places, n), partial(rice.find_bits, rice.set_bits(places, n))
    return Case(0.125 + 8 * RATIO, ways[decoding], False, True)


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
        f"feedback_{name}{suffix}": partial(_feedback, name=name, lane=bool(suffix))
        for name in ("sign", "int8", "int4", "int2")
        for suffix in ("", "_lane")
    },
    "torch_sign": lambda s: Case(4.125, partial(plain.sign, s.x), False, True),
    "torch_qsgd": lambda s: Case(5 + 4 / 512, partial(plain.qsgd, s.x), False, True),
    "torch_int4": lambda s: Case(4.5 + 4 / _INT_BLOCK, partial(plain.int4, s.x), False, True),
    **{
        f"{name}_{way}": partial(_code, name=name, decoding=way == "decode")
        for name in QUANTIZERS
        for way in ("encode", "decode")
    },
    "draw": _draw,
    f"scatter_mean_{WORLD}": lambda s: Case(4.0, partial(fused.scatter_mean, *s.messages, s.n, WORLD)),
    f"scatter_mean_there_{WORLD}": _scatter_mean_there,
    **{
        f"{name}_{way}": partial(make, decoding=way == "decode")
        for name, make in (("rice", _rice), ("rows", _rows), ("bitmap", _bitmap))
        for way in ("encode", "decode")
    },
    **{f"merge_{name}_{WORLD}": partial(_merge, name=name) for name in ("int8", "int4", "int2", "sign")},
    "powersgd": _powersgd,
    "powersgd_orthonormal": _orthonormal,
}
