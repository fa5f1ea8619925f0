"""Presets: the well-known whole methods by name. Each is only a spec; `print(wire)` shows what it stands for."""

from dataclasses import replace
from typing import Any

from gradwire.codecs.codec import Codec, codec
from gradwire.codecs.quantizers import FP32, Int4, Sign
from gradwire.codecs.selectors import TopK
from gradwire.codecs.stage import IndexCoder, Quantizer, Stage
from gradwire.core.registry import register
from gradwire.engine.method import Method, method
from gradwire.exchanges import Auto, Majority, TwoWay
from gradwire.feedback import CommonMomentum, MomentumCorrection, NoFeedback, PreconditionedMomentum, Residual


@register("dgc", kind="preset")
def dgc(
    ratio: float = 0.001,
    momentum: float = 0.9,
    nesterov: bool = False,
    masking: bool = True,
    clip: float | None = None,
    values: Quantizer = FP32(),  # noqa: B008 - a frozen value
    indices: IndexCoder | None = None,
    ramp: int = 0,
) -> Method:
    """Deep Gradient Compression (Lin et al., ICLR 2018), by exact selection; ``ramp`` is the warm-up in steps."""
    chain: Codec = TopK(ratio) | values
    if indices is not None:
        chain = chain | indices
    feedback = MomentumCorrection(momentum, nesterov, masking, clip)
    whole = Method(((0, chain),), feedback, Auto())
    return ramped(whole, ramp) if ramp else whole


@register("ef_signsgd", kind="preset")
def ef_signsgd() -> Method:
    """EF-SignSGD (Karimireddy et al., ICML 2019): one bit, with error feedback."""
    return Method(((0, codec(Sign())),), Residual(), Auto())


@register("onebit_adam", kind="preset")
def onebit_adam(start: int = 256, beta: float = 0.9, per: int = 4096, first: Quantizer = Int4()) -> Method:  # noqa: B008 - a frozen value
    """1-bit Adam (Tang et al., ICML 2021): ``first`` for ``start`` steps, then AdamW's momentum, one bit an entry.

    The variance is frozen after the start. Both legs keep their errors; every ``per`` entries have a scale.
    """
    table = ((0, codec(first)), (start, codec(Sign(per=per))))
    return Method(table if start else ((0, table[1][1]),), CommonMomentum(beta), TwoWay(), start)


@register("dgc_adam", kind="preset")
def dgc_adam(
    ratio: float = 0.01,
    start: int = 256,
    beta: float = 0.9,
    masking: bool = True,
    values: Quantizer = Sign(per=64),  # noqa: B008 - a frozen value
    first: Quantizer = Int4(),  # noqa: B008 - a frozen value
) -> Method:
    """Deep Gradient Compression in front of AdamW: ``first`` for ``start`` steps, then the largest entries.

    With ratio 1 and exact values it is Adam with a variance that is frozen after the start.
    """
    chain = codec(values) if ratio == 1.0 else TopK(ratio) | values
    table = ((0, codec(first)), (start, chain))
    return Method(table if start else ((0, table[1][1]),), PreconditionedMomentum(beta, masking), Auto(), start)


@register("majority_vote", kind="preset")
def majority_vote() -> Method:
    """SignSGD with majority vote (Bernstein et al., ICLR 2019)."""
    return Method(((0, codec(Sign())),), NoFeedback(), Majority())


@register("dense", kind="preset")
def dense() -> Method:
    """No compression: float32, all-reduced."""
    return Method(((0, codec(FP32())),), NoFeedback(), Auto())


@register("ramp", kind="preset")
def ramped(spec: Method | Codec | Stage, steps: int) -> Method:
    """DGC's exponential warm-up: density 25 %, then a quarter of the last, over ``steps`` steps, to the spec's own."""
    whole = method(spec)
    chain = whole.last
    ratio = getattr(chain.selector, "ratio", None)
    if ratio is None or len(whole.table) > 1:
        raise ValueError(f"ramp({spec}) needs one codec whose selector has a ratio, such as topk(0.001)")
    if steps < 1:
        raise ValueError(f"ramp(..., steps={steps}) must take at least one step")
    stages = _densities(ratio)
    selector: Any = chain.selector
    densities = {steps * i // len(stages): density for i, density in enumerate(stages)}
    table = [(at, replace(chain, selector=replace(selector, ratio=density))) for at, density in densities.items()]
    return replace(whole, table=(*table, (steps, chain)))


def _densities(ratio: float) -> list[float]:
    quarters = [0.25**i for i in range(1, 16)]
    # 0.4 % is followed by 0.1 %, not by 0.098 %: a stage within a tenth of the goal is the goal.
    return [density for density in quarters if density > ratio * 1.1]
