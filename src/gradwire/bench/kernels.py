"""How fast each kernel is: against the memory it must touch, and against its definition in plain torch.

The floor of a kernel is the time of a copy that reads and writes as many bytes as the kernel must, in the same run.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradwire.core.keys import Key
from gradwire.core.segments import on
from gradwire.kernels import fused, quantize
from gradwire.kernels.dispatch import offers, reference_only
from gradwire.kernels.fused import Accumulation
from gradwire.kernels.rice import decode_blocks, encode_blocks, gaps_of, rice_decode, rice_encode
from gradwire.kernels.select import permute, share

RATIO = 0.001
WORLD = 8
_RULE = Accumulation(momentum=0.9)
_KEY = Key(seed=0, step=7, rank=0)


class Case(NamedTuple):
    """One thing to time.

    Attributes:
        name: What it is called in the rows.
        bytes: What it cannot avoid reading and writing, for each element.
        run: Does it once.
        repeatable: Whether a graph of it may be replayed.
    """

    name: str
    bytes: float
    run: Callable[[], object]
    repeatable: bool = True


def resnet50() -> tuple[int, ...]:
    """The sizes of ResNet-50's 161 tensors: each convolution is followed by the two of its norm."""
    sizes, inputs = [64 * 3 * 49, 64, 64], 64
    for width, depth in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for i in range(depth):
            sizes += [inputs * width, width, width, width * width * 9, width, width]
            sizes += [width * width * 4, 4 * width, 4 * width]
            sizes += [inputs * width * 4, 4 * width, 4 * width] if i == 0 else []
            inputs = 4 * width
    return (*sizes, 2048 * 1000, 1000)


def measure(
    device: torch.device | str,
    sizes: Iterable[int | tuple[int, ...]],
    only: str = "",
    repeats: int = 30,
    report: Callable[[dict[str, Any]], object] = lambda row: None,
) -> list[dict[str, Any]]:
    """Time every kernel whose name contains ``only``, on buffers of these sizes, or of segments of these lengths.

    ``report`` is told each row as soon as it is measured.
    """
    device = torch.device(device)
    rows = []
    for size in sizes:
        lengths = size if isinstance(size, tuple) else (size,)
        for case in _cases(lengths, device):
            if only in case.name:
                rows.append(_row(case, lengths, device, repeats))
                report(rows[-1])
    return rows


def _row(case: Case, lengths: tuple[int, ...], device: torch.device, repeats: int) -> dict[str, Any]:
    n = sum(lengths)
    needed = int(case.bytes * n)
    copy = _copier(needed, device)
    if device.type == "cpu":
        floor, ms = _in_turns(copy, case.run, repeats)
    else:
        floor, ms = _median(copy, device, repeats), _median(case.run, device, repeats)
    replayed = _replayed(case.run, repeats) if device.type == "cuda" and case.repeatable else None
    with reference_only():
        plain = _median(case.run, device, max(3, repeats // 10), warm=1)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return {
        "kernel": case.name,
        "device": device.type,
        "n": n,
        "segments": len(lengths),
        "bytes_per_element": case.bytes,
        "ms": ms,
        "graph_ms": replayed,
        "floor_ms": floor,
        "reference_ms": plain,
        "gb_per_s": needed / ms / 1e6,
        "to_floor": ms / floor,
        "graph_to_floor": replayed / floor if replayed else None,
        "to_reference": plain / ms,
        "load": os.getloadavg()[0],  # of the machine: others' work shows in a CPU's figures
    }


def _copier(needed: int, device: torch.device) -> Callable[[], object]:
    """A copy that reads and writes so many bytes in all."""
    source = torch.empty(max(needed // 8, 1), device=device).uniform_()
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _in_turns(one: Callable[[], object], other: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Medians of both, in milliseconds, run by turns: what else the machine does hits both alike."""
    for _ in range(3):
        one()
        other()
    pairs = [(_clocked(one), _clocked(other)) for _ in range(repeats)]
    return statistics.median(pair[0] for pair in pairs), statistics.median(pair[1] for pair in pairs)


def _cases(lengths: tuple[int, ...], device: torch.device) -> Iterator[Case]:
    n = sum(lengths)
    x = torch.randn(n, device=device)
    counts = tuple(share(RATIO, size) for size in lengths)
    names, table = tuple(map(str, range(len(lengths)))), torch.tensor(lengths, device=device)
    yield Case("dgc", 20.0, _dgc(lengths, counts, device, True))
    yield Case("error_feedback_topk", 12.0, _dgc(lengths, counts, device, False))
    yield Case("topk", 4.0, lambda: fused.topk(x, lengths, counts))
    if len(lengths) == 1:
        yield Case("torch_topk", 4.0, lambda: torch.topk(x.abs(), counts[0], sorted=False), False)
    residual = torch.randn(n, device=device)
    yield Case("feedback_sign", 20.125, lambda: fused.feedback_sign_(x, residual, 1.0, lengths, False))
    yield Case("feedback_int4", 12.5 + 4 / 256, lambda: fused.feedback_integer_(x, residual, 1.0, lengths, 4, 256))
    coders: list[tuple[str, float, Callable[[], Tensor], Callable[[Tensor], Tensor]]] = [
        ("sign", 4.125, lambda: quantize.sign_encode(x, table, False), lambda d: quantize.sign_decode(d, table)),
        ("onebit", 4.125, lambda: quantize.onebit_encode(x, table), lambda d: quantize.onebit_decode(d, table)),
        (
            "qsgd",
            5 + 4 / 512,
            lambda: quantize.qsgd_encode(x, table, names, _KEY, 127, 512),
            lambda d: quantize.qsgd_decode(d, table, 127, 512, False),
        ),
        (
            "qsgd_whole",
            9.0,
            lambda: quantize.qsgd_encode(x, table, names, _KEY, 127, None),
            lambda d: quantize.qsgd_decode(d, table, 127, None, False),
        ),
        (
            "terngrad",
            8.2,
            lambda: quantize.ternary_encode(x, table, names, _KEY, 2.5),
            lambda d: quantize.ternary_decode(d, table),
        ),
        (
            "natural",
            5.125,
            lambda: quantize.natural_encode(x, table, names, _KEY),
            lambda d: quantize.natural_decode(d, n),
        ),
    ]
    coders += [(name, 6.0, *_cast(x, dtype)) for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16))]
    coders += [(f"int{bits}", 4 + bits / 8 + 4 / 256, *_integer(x, table, bits)) for bits in (8, 4, 2)]
    for name, needed, encode, decode in coders:
        yield Case(f"{name}_encode", needed, encode)
        data = encode()
        # Decoding has no second pass over the values.
        yield Case(f"{name}_decode", min(needed, 6.0 if name in ("fp16", "bf16") else 5.2), partial(decode, data))
    sizes = on(lengths, device)
    yield Case("draw", 8 * RATIO, lambda: permute(sizes, names, _KEY, lengths, counts))
    yield from _sparse(n, sum(counts), device)


def _integer(x: Tensor, table: Tensor, bits: int) -> tuple[Callable[[], Tensor], Callable[[Tensor], Tensor]]:
    def encode() -> Tensor:
        return quantize.integer_encode(x, table, bits, 256)

    def decode(data: Tensor) -> Tensor:
        return quantize.integer_decode(data, table, bits, 256)

    return encode, decode


def _cast(x: Tensor, dtype: torch.dtype) -> tuple[Callable[[], Tensor], Callable[[Tensor], Tensor]]:
    return partial(quantize.cast_encode, x, dtype), quantize.cast_decode


def _dgc(
    lengths: tuple[int, ...], counts: tuple[int, ...], device: torch.device, momentum: bool
) -> Callable[[], object]:
    """A whole step of compression; gradients take turns, and the hint lives where a graph finds it again.

    The memories start as they are after some thousand steps: young ones grow by much at every step.
    """
    n = sum(lengths)
    grads = [torch.randn(n, device=device) for _ in range(2)]
    u = 2.3 * torch.randn(n, device=device) if momentum else None
    memories = (300 if momentum else 30) * torch.randn(n, device=device), u
    hint: Tensor | None = None
    turn = 0

    def step() -> None:
        nonlocal turn, hint
        turn += 1
        found = fused.send_topk_(grads[turn % 2], memories, memories, True, _RULE, lengths, counts, hint)
        hint = found.edge if hint is None or hint.shape != found.edge.shape else hint.copy_(found.edge)

    return step


def _sparse(n: int, k: int, device: torch.device) -> Iterator[Case]:
    """Messages of ``k`` random positions: their mean over several ranks, and their gaps as Rice codes."""
    places = [torch.randint(n, (k,), device=device).unique() for _ in range(WORLD)]
    bounds = (0, *torch.tensor([p.numel() for p in places]).cumsum(0).tolist())
    indices, values = torch.cat(places), torch.randn(bounds[-1], device=device)
    yield Case(f"scatter_mean_{WORLD}", 4.0, lambda: fused.scatter_mean(values, indices, bounds, n, WORLD))
    yield from _rice(places[0], n)
    yield from _merges(n // WORLD // 8 * 8, device)


def _rice(places: Tensor, n: int) -> Iterator[Case]:
    """Positions, or, where the device has no kernel for those, their gaps."""
    if offers(places.device.type, "rice_encode"):
        yield Case("rice_encode", 0.002, lambda: rice_encode(places, n))
        row = rice_encode(places, n)[0][None]
        yield Case("rice_decode", 0.002, lambda: rice_decode(row, places.numel(), n))
        return
    gaps = gaps_of(places)
    yield Case("rice_encode", 0.002, lambda: encode_blocks(gaps, 4), False)
    data = encode_blocks(gaps, 4)
    yield Case("rice_decode", 0.002, lambda: decode_blocks(data, gaps.numel(), 4), False)


def _merges(n: int, device: torch.device) -> Iterator[Case]:
    """A server's turn with messages of several ranks for ``n`` elements, a debt, and one message back."""
    if n == 0:
        return
    x, debt, table = torch.randn(n, device=device), torch.randn(n, device=device), torch.tensor([n], device=device)
    rows = quantize.integer_encode(x, table, 4, 256).repeat(WORLD, 1)
    code = 0.5 + 4 / 256
    needed = (WORLD * code + 8 + code) / WORLD  # of each element of the whole vector, of which this is one shard
    yield Case(f"merge_int4_{WORLD}", needed, lambda: fused.merge_integer(rows, debt, (n,), 4, 256))
    bits = quantize.sign_encode(x, table, False).repeat(WORLD, 1)
    needed = (WORLD / 8 + 16 + 1 / 8) / WORLD
    yield Case(f"merge_sign_{WORLD}", needed, lambda: fused.merge_sign(bits, debt, (n,), False))


def _median(run: Callable[[], object], device: torch.device, repeats: int, warm: int = 3) -> float:
    """Milliseconds of one call: the median of several, after some that do not count."""
    for _ in range(warm):
        run()
    if device.type != "cuda":
        return statistics.median(_clocked(run) for _ in range(repeats))
    pairs = [(_event(), _event()) for _ in range(repeats)]
    for start, end in pairs:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return float(statistics.median(start.elapsed_time(end) for start, end in pairs))


def _replayed(run: Callable[[], object], repeats: int) -> float:
    """Milliseconds of one call as a captured graph: without the launches' cost on the host."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return _median(graph.replay, torch.device("cuda"), repeats)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def _clocked(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3
