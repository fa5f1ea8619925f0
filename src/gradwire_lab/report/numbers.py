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


def mean_and_spread(told: Estimate) -> str:
    """A mean with its sample standard deviation; of a single value only itself."""
    if math.isnan(told.mean):
        return "diverged"
    return f"{told.mean:.2f}" if told.spread is None else f"{told.mean:.2f} +- {told.spread:.2f}"


def ends(told: Estimate, least: float, most: float) -> str:
    """The 95 % interval, as far as it is possible."""
    if told.low is None or told.high is None or math.isnan(told.mean):
        return ""
    cut = told.within(least, most)
    return f"{cut.low:.2f} to {cut.high:.2f}{' (cut)' * (cut != told)}"


def difference(told: Estimate, reach: float = math.inf) -> str:
    """A mean difference with the ends of its 95 % interval, of which none can be more than ``reach``."""
    if told.low is None or told.high is None:
        return f"{told.mean:+.2f}"
    cut = told.within(-reach, reach)
    return f"{told.mean:+.2f} [{cut.low:+.2f}, {cut.high:+.2f}]{' (cut)' * (cut != told)}"


def rounded(value: float | None) -> float | None:
    """Five digits are more than a chart shows, and keep the page small. JSON knows no infinity."""
    return float(f"{value:.5g}") if value is not None and math.isfinite(value) else None
