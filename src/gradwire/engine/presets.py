"""Presets: the well-known whole methods by name. Each is only a spec; `print(wire)` shows what it stands for."""

from dataclasses import replace
from typing import Any

from gradwire.codecs.codec import Codec, codec
from gradwire.codecs.quantizers import FP32, Sign
from gradwire.codecs.selectors import TopK
from gradwire.codecs.stage import IndexCoder, Quantizer, Stage
from gradwire.core.registry import register
from gradwire.engine.method import Method, method
from gradwire.exchanges import Auto, Majority
from gradwire.feedback import MomentumCorrection, NoFeedback, Residual


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
