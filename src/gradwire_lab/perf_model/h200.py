"""H200: what compressing costs on one GPU that was measured, for models of any size.

The figures are those of `gradwire bench kernels --device cuda`, published with the project. A kernel that was timed at
two sizes is a line through both; one that was timed at one size is as steep as that, and starts where DGC's line does.
What no kernel was timed for is marked as assumed. Launching kernels from Python costs more on small models than
this knows; so does everything of a step that is not a kernel.
"""

import json
from collections import defaultdict
from functools import cache
from importlib import resources
from typing import Any

from gradwire.codecs.codec import Codec
from gradwire.engine.lane import Lane
from gradwire.feedback import MomentumCorrection
from gradwire_lab.perf_model.calibration import CodingCost
from gradwire_lab.perf_model.comm_schedule import SETTLED
from gradwire_lab.perf_model.model import DENSE, ModelProfile

# Assumed, since low-rank products were not timed: bytes of memory that every weight costs, read and written, and how
# far from the speed of a copy they are. Eight reads or writes of four bytes; the slowest timed kernel is at 3.5.
_LOW_RANK_BYTES, _LOW_RANK_SLOWDOWN = 32, 3.5
_LOW_RANK_START = 1e-3  # seconds of each bucket: many small kernels
# Of int8 and onebit_adam, the fused kernels were not timed: those of int4 and sign stand in; chunks are as top-k is.
ASSUMED = ("powersgd", "int8", "onebit_adam", "zero_one_adam", "sparseloco")


@cache
def rows() -> tuple[dict[str, Any], ...]:
    """What was measured."""
    text = (resources.files("gradwire_lab.perf_model") / "kernels-h200.jsonl").read_text(encoding="utf-8")
    return tuple(map(json.loads, text.splitlines()))


@cache
def lines() -> dict[str, tuple[float, float]]:
    """Kernels by name: seconds to start, and seconds for each element."""
    points: defaultdict[str, dict[int, float]] = defaultdict(dict)
    for row in rows():
        seconds = row["ms"] / 1000
        points[row["kernel"]][row["n"]] = min(seconds, points[row["kernel"]].get(row["n"], seconds))
    start = _line(points["dgc"], 0.0)[0]
    return {name: _line(found, start) for name, found in points.items()}


@cache
def copy_seconds() -> float:
    """Of one byte, read or written."""
    dgc = max((row for row in rows() if row["kernel"] == "dgc"), key=lambda row: int(row["n"]))
    seconds, moved = float(dgc["floor_ms"]) / 1000, float(dgc["bytes_per_element"]) * int(dgc["n"])
    return seconds / moved


def _line(points: dict[int, float], start: float) -> tuple[float, float]:
    (n, low), (m, high) = min(points.items()), max(points.items())
    if n == m:
        return start, max(0.0, low - start) / n
    slope = max(0.0, high - low) / (m - n)
    return max(0.0, low - slope * n), slope


def kernel(name: str, n: float) -> float:
    """Seconds for n elements, the start aside."""
    return lines()[name][1] * n


def start(*names: str) -> float:
    """Seconds to start some kernels."""
    return sum(lines()[name][0] for name in names)


def assumed(spec: str) -> bool:
    """Whether what a spec costs was not timed."""
    return spec.startswith(ASSUMED)


def cost(model: ModelProfile, spec: str, world: int) -> CodingCost:
    """What a spec costs in a step of a model."""
    if spec in DENSE:
        cast = 0.0 if spec == "ddp-fp32" else 6 * model.elements * copy_seconds()
        return CodingCost(cast, cast)
    plan = model.plan(spec, world, 2**62)  # in one bucket: the cost of starting a bucket is a figure of its own
    (lane,) = [lane for lane in plan.lanes if lane.label == "*"]
    codec, exchange = lane.at(SETTLED)
    if exchange.compresses_in_protocol:
        work = _LOW_RANK_BYTES * lane.units.total * copy_seconds() * _LOW_RANK_SLOWDOWN
        return CodingCost(work / 2, work / 2, start=_LOW_RANK_START)
    return _whole(lane, codec, world) if codec.selector is None else _selected(lane, codec, world)


def _whole(lane: Lane, codec: Codec, world: int) -> CodingCost:
    """Two legs: a rank's slice of every message, whose sum is encoded again; then every rank's slice of that."""
    n = lane.units.total
    name = codec.quantizer.name
    fused, encode, decode = f"feedback_{'int4' if name == 'int8' else name}", f"{name}_encode", f"{name}_decode"
    seconds = 2 * kernel(decode, n) + kernel(encode, n / world)
    return CodingCost(kernel(fused, n), seconds, start=start(fused, decode, encode, decode))


def _selected(lane: Lane, codec: Codec, world: int) -> CodingCost:
    assert codec.selector is not None
    n = lane.units.total
    kept = sum(map(codec.selector.capacity, lane.units.lengths))
    fused = "dgc" if isinstance(lane.feedback, MomentumCorrection) else "error_feedback_topk"
    # Rice codes were timed on a thousandth of the vector; means, of eight messages.
    each = kernel("rice_decode", 1000 * kept) + kernel("scatter_mean_8", n) / 8
    encode = kernel(fused, n) + kernel("rice_encode", 1000 * kept)
    starts = start(fused, "rice_encode", "scatter_mean_8") + world * start("rice_decode") / 8
    return CodingCost(encode, world * each, each, start=starts)
