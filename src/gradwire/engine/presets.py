"""Presets: the well-known whole methods by name. Each is only a spec; `print(wire)` shows what it stands for.

dgc             Deep Gradient Compression: top-k, `feedback/momentum_correction.py`, and a warm-up (`ramp`)
ef_signsgd      signs with error feedback (`feedback/residual.py`)
onebit_adam     1-bit Adam, and zero_one_adam, 0/1 Adam: `feedback/common_momentum.py`
dgc_adam        DGC in front of AdamW: `feedback/preconditioned_momentum.py`
ef21_sgdm       EF21 with momentum: `feedback/ef21_momentum.py`
demo            DeMo: `codecs/transforms/dct.py`, `feedback/decoupled_momentum.py`
majority_vote   signs with a majority vote (`exchanges/majority.py`)
dense           float32
ramp            the warm-up of dgc, for any codec whose selector has a ratio
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from gradwire.codecs import Codec, Quantizer, Stage, codec
from gradwire.codecs.quantizers import FP32, Int4, Sign, TwoBit
from gradwire.codecs.selectors import ChunkTopK, TopK
from gradwire.codecs.stage import IndexCoder
from gradwire.codecs.transforms import DCT
from gradwire.core import register
from gradwire.engine.method import Method, method
from gradwire.exchanges import Auto, Exchange, Majority, TwoWay
from gradwire.feedback import (
    CommonMomentum,
    DecoupledMomentum,
    EF21Momentum,
    Feedback,
    MomentumCorrection,
    NoFeedback,
    PreconditionedMomentum,
    Residual,
)

START_SHARE = 0.15  # of a training: a start that measures a variance; docs/adamw.md has what shorter ones cost
FEWEST_START = 100  # steps, however short the training is
_USUAL_START = 256  # where the length of the training is not known
_MASKED = 0.05  # of the entries: where fewer are sent, dgc_adam masks its momentum
Start: TypeAlias = "Stage | Codec | Mapping[int, Stage | Codec]"  # how gradients are sent before momentum is


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
    made = Method(((0, chain),), feedback, Auto())
    return ramped(made, ramp) if ramp else made


@register("ef_signsgd", kind="preset")
def ef_signsgd() -> Method:
    """EF-SignSGD (Karimireddy et al., ICML 2019): one bit, with error feedback."""
    return Method(((0, codec(Sign())),), Residual(), Auto())


@register("onebit_adam", kind="preset")
def onebit_adam(
    start: int | None = None,
    beta: float = 0.9,
    per: int = 4096,
    first: "Start | None" = None,
    floor: float = 0.1,
    divide: str = "before",
    alone: int = 0,
    steps: int | None = None,
) -> Method:
    """1-bit Adam (Tang et al., ICML 2021): signs of AdamW's momentum; before, ``first`` for ``start`` steps.

    By default the first three fifths of the start are sent as ``twobit``, and the rest, which measures the variance, as
    ``int4``. The variance is frozen after the start; its root is at least ``floor`` of a tensor's mean. Momentum is
    divided by it ``before`` compression, or ``after`` as in the paper. Both legs keep their errors; ``per`` entries
    share a scale. For ``alone`` steps of the start nothing is sent; then all ranks go on from rank 0's weights and
    moments. Where only the ``steps`` of the training are given, the start takes 15 % of them, but no fewer than 100;
    where neither is, 256 steps.
    """
    start = _start_of(start, steps)
    first = {0: TwoBit()} | {3 * start // 5: Int4()} if first is None else first
    return _started(start, alone, first, codec(Sign(per=per)), CommonMomentum(beta, floor, divide), TwoWay())


@register("zero_one_adam", kind="preset")
def zero_one_adam(
    start: int | None = None,
    beta: float = 0.9,
    per: int = 4096,
    first: Start = Int4(),  # noqa: B008 - a frozen value
    floor: float = 0.1,
    divide: str = "before",
    alone: int = 0,
    refresh: int = 16,
    steps: int | None = None,
) -> Method:
    """0/1 Adam (Lu et al., ICLR 2023): ``onebit_adam`` with fresh variances; some steps send gradients, for these.

    Those steps are 0, 1, 2, ...: ``refresh`` of them one step apart, as many two, as many four, and so on; in the start
    all steps send gradients. The paper's local steps are not part of it.
    """
    whole = onebit_adam(start, beta, per, first, floor, divide, alone, steps)
    return replace(whole, refresh=refresh)


@register("dgc_adam", kind="preset")
def dgc_adam(
    ratio: float = 0.01,
    start: int | None = None,
    beta: float = 0.9,
    masking: bool | None = None,
    values: Quantizer = Sign(per=64),  # noqa: B008 - a frozen value
    first: Start = Int4(),  # noqa: B008 - a frozen value
    floor: float = 0.1,
    alone: int = 0,
    decay: float = 1.0,
    ramp: int = 0,
    steps: int | None = None,
) -> Method:
    """Deep Gradient Compression in front of AdamW: ``first`` for ``start`` steps, then the largest entries.

    With ratio 1 and exact values it is Adam with a variance that is frozen after the start. ``decay`` of the error is
    kept from step to step; ``masking`` is Deep Gradient Compression's. It harms where a tenth of the entries is sent,
    so that by default it is on below a ratio of 0.05. For ``ramp`` steps after the start more entries are sent: a
    quarter of all, a quarter of those, and so on. ``steps`` is as in ``onebit_adam``.
    """
    start = _start_of(start, steps)
    chain = codec(values) if ratio == 1.0 else TopK(ratio) | values
    masks = ratio < _MASKED if masking is None else masking
    made = _started(start, alone, first, chain, PreconditionedMomentum(beta, masks, floor, decay), Auto())
    denser = _ramp(chain, ratio, ramp, start) if ramp else ()
    return replace(made, table=(*made.table[:-1], *denser, (start + ramp, chain))) if denser else made


def _start_of(start: int | None, steps: int | None) -> int:
    """The steps of a start that measures a variance: as they are given, or by the length of the training."""
    if steps is not None and not (isinstance(steps, int) and steps > 0):
        raise ValueError(f"steps={steps} must be how many steps the training has; leave it out where that is not known")
    if start is not None and not (isinstance(start, int) and start >= 0):
        raise ValueError(
            f"start={start} must be a number of steps; for a share of the training write steps=, its length"
        )
    if start is not None:
        return start
    return _USUAL_START if steps is None else max(FEWEST_START, round(START_SHARE * steps))


def _started(start: int, alone: int, first: Start, chain: Codec, feedback: Feedback, exchange: Exchange) -> Method:
    """Gradients as ``first`` for ``start`` steps, none of them sent for ``alone`` steps; then momentum."""
    if not 0 <= alone < max(start, 1):
        raise ValueError(
            f"alone={alone} must be less than start={start}: in the rest of the start, ranks measure the variance of "
            "their mean gradient"
        )
    begin = first if isinstance(first, Mapping) else {0: first}
    table = [(step, codec(spec)) for step, spec in begin.items() if step < start]
    return Method((*table, (start, chain)), feedback, exchange, start, alone)


@register("ef21_sgdm", kind="preset")
def ef21_sgdm(ratio: float = 0.01, momentum: float = 0.9, values: Quantizer = FP32()) -> Method:  # noqa: B008 - a frozen value
    """EF21 with momentum (Fatkhullin et al., NeurIPS 2023), in front of SGD without momentum."""
    return Method(((0, TopK(ratio) | values),), EF21Momentum(momentum), Auto())


@register("demo", kind="preset")
def demo(k: int = 32, side: int = 64, momentum: float = 0.999, values: Quantizer = FP32()) -> Method:  # noqa: B008 - a frozen value
    """DeMo (Peng et al., 2024), in front of SGD without momentum: ``k`` cosine components of every tile of a matrix."""
    return Method(((0, DCT(side) | ChunkTopK(k, side * side) | values),), DecoupledMomentum(momentum), Auto())


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
    """DGC's exponential warm-up; density 25 %, then a quarter of the last, over ``steps`` steps, to the spec's own."""
    made = method(spec)
    chain = made.last
    ratio = getattr(chain.selector, "ratio", None)
    if ratio is None or len(made.table) > 1:
        raise ValueError(f"ramp({spec}) needs one codec whose selector has a ratio, such as topk(0.001)")
    if steps < 1:
        raise ValueError(f"ramp(..., steps={steps}) must take at least one step")
    return replace(made, table=(*_ramp(chain, ratio, steps), (steps, chain)))


def _ramp(chain: Codec, ratio: float, steps: int, begin: int = 0) -> tuple[tuple[int, Codec], ...]:
    """A codec by step, with higher ratios on the way to its own."""
    quarters = [0.25**i for i in range(1, 16)]
    # 0.4 % is followed by 0.1 %, not by 0.098 %: a density within a tenth of the goal is the goal.
    densities = [density for density in quarters if density > ratio * 1.1]
    by_step = {begin + steps * i // len(densities): density for i, density in enumerate(densities)}
    selector: Any = chain.selector
    return tuple((step, replace(chain, selector=replace(selector, ratio=density))) for step, density in by_step.items())
