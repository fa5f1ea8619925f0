"""Numbers as people read them."""

import math

from gradwire_lab.report.statistics import Estimate


def in_bytes(n: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000:
            return f"{n:.0f} B" if unit == "B" else f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:,.3g} TB" if n < 1000 else f"{n:,.0f} TB"


def in_seconds(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:.2f} h"


def ratio(times: float) -> str:
    if not math.isfinite(times):
        return "inf"
    return f"{times:,.0f}x" if times >= 100 else f"{times:.3g}x"


def mean_and_spread(estimate: Estimate) -> str:
    """A mean with its sample standard deviation; of a single value only itself."""
    if math.isnan(estimate.mean):
        return "diverged"
    return f"{estimate.mean:.2f}" if estimate.spread is None else f"{estimate.mean:.2f} +- {estimate.spread:.2f}"


def ends(estimate: Estimate, least: float, most: float) -> str:
    """The 95 % interval, as far as it is possible."""
    if estimate.low is None or estimate.high is None or math.isnan(estimate.mean):
        return ""
    cut = estimate.within(least, most)
    return f"{cut.low:.2f} to {cut.high:.2f}{' (cut)' * (cut != estimate)}"


def difference(estimate: Estimate, reach: float = math.inf) -> str:
    """A mean difference with the ends of its 95 % interval, of which none can be more than ``reach``."""
    if estimate.low is None or estimate.high is None:
        return _signed(estimate.mean)
    cut = estimate.within(-reach, reach)
    return f"{_signed(estimate.mean)} [{_signed(cut.low)}, {_signed(cut.high)}]{' (cut)' * (cut != estimate)}"


def _signed(value: float | None) -> str:
    """With two digits; what they round to zero is not negative."""
    return f"{value:+.2f}".replace("-0.00", "+0.00")


def rounded(value: float | None) -> float | None:
    """Five digits are more than a chart shows, and keep the page small. JSON knows no infinity."""
    return float(f"{value:.5g}") if value is not None and math.isfinite(value) else None
