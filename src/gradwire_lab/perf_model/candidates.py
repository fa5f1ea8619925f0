"""Candidates: the ways to synchronize that are weighed against dense training, from the one that loses least.

Momentum correction, as in ``dgc``, needs an optimizer without momentum, which only its owner can arrange: it is
weighed in advice, but never chosen by ``auto``.
"""

from collections.abc import Sequence

from gradwire.engine.method import method, starves_adaptive
from gradwire.feedback import MomentumCorrection

CANDIDATES = (
    "int8",
    "int4",
    "powersgd(4)",
    "sign",
    "powersgd(2)",
    "topk(0.01) | sign",
    "topk(0.003) | sign",
    "topk(0.001) | fp16",
    "topk(0.001) | sign",
    "dgc(0.001)",
)

# The other methods that have a name of their own (`ef_signsgd` is `sign`): predicted, and taken if --specs names them.
PRESETS = ("qsgd", "terngrad", "majority_vote")


OPTIONS = ("exchange", "feedback", "granularity", "bundle")  # those that decide what is sent


def arguments(text: str, known: Sequence[str] = OPTIONS) -> tuple[str, dict[str, str | None]]:
    """The spec, and the keywords of `gradwire.compress`, of ``int4; exchange=two_way``.

    Raises:
        ValueError: An option is not ``known``.
    """
    spec, *pairs = (part.strip() for part in text.split(";"))
    options: dict[str, str | None] = {}
    for pair in pairs:
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or key not in known:
            raise ValueError(f"cannot read the option {pair!r} of {text!r}; write for example exchange=two_way")
        options[key] = None if value == "none" and key in ("bundle", "codec") else value
    return spec, options


def automatic(adaptive: bool = False) -> tuple[str, ...]:
    """Those that leave the user's optimizer as it is, and, where it is ``adaptive``, do not starve it."""
    ways = [spec for spec in CANDIDATES if not isinstance(method(spec).feedback, MomentumCorrection)]
    return tuple(spec for spec in ways if suits_adaptive(spec) or not adaptive)


def suits_adaptive(spec: str) -> bool:
    """Whether an adaptive optimizer can follow a spec."""
    whole = method(arguments(spec)[0])
    corrects = isinstance(whole.feedback, MomentumCorrection)  # and Adam has momentum of its own
    return not corrects and not starves_adaptive(whole.last, whole.feedback, whole.exchange)
