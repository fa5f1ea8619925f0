"""Candidates: the ways to synchronize that are weighed against dense training, from the one that loses least.

Momentum correction, as in ``dgc``, needs an optimizer without momentum, which nobody but its owner can arrange: it is
weighed in advice, but never chosen by ``auto``.
"""

from gradwire.feedback import MomentumCorrection
from gradwire.sync.method import method

CANDIDATES = (
    "int8",
    "int4",
    "powersgd(4)",
    "sign",
    "powersgd(2)",
    "topk(0.01)",
    "topk(0.01) | sign",
    "randomk(0.01)",
    "topk(0.001)",
    "topk(0.001) | sign",
    "dgc(0.001)",
)


def automatic(specs: tuple[str, ...] = CANDIDATES) -> tuple[str, ...]:
    """Those that leave the user's optimizer as it is."""
    return tuple(spec for spec in specs if not isinstance(method(spec).feedback, MomentumCorrection))
