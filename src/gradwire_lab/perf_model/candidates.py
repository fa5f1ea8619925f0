"""Candidates: the ways to synchronize that are weighed against dense training, from the one that loses least.

Some need what only the owner of a training can arrange: momentum correction, as in ``dgc``, an optimizer without
momentum; ``onebit_adam`` an optimizer of gradwire's. They are weighed in advice, but never chosen by ``auto``. Local
steps are weighed apart, in `local_steps`.
"""

from collections.abc import Sequence
from functools import cache

from gradwire.core.spec import parse
from gradwire.engine.method import method, starves_adaptive
from gradwire.feedback import MomentumCorrection
from gradwire.local.method import LocalMethod

CANDIDATES = (
    "int8",
    "int4",
    "onebit_adam(start=450)",  # of 1,500 steps, as it was trained; a shorter start lost
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


def arguments(text: str) -> tuple[str, dict[str, str | None]]:
    """The spec, and the keywords of `gradwire.compress`, of ``int4; exchange=two_way``; of a round, its message's.

    Raises:
        ValueError: An option is none of `OPTIONS`.
    """
    spec, options = read_options(text, OPTIONS)
    if (rounds := local_rounds(spec)) is None:
        return spec, options
    message = rounds.message
    return str(message.last), {"feedback": str(message.feedback), "exchange": str(message.exchange), **options}


def read_options(text: str, known: Sequence[str]) -> tuple[str, dict[str, str | None]]:
    """The spec and the keywords of ``int4; exchange=two_way``.

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


@cache
def local_rounds(spec: str) -> LocalMethod | None:
    """The round of local steps that a spec stands for, if it is one."""
    made = parse(spec)
    return made if isinstance(made, LocalMethod) else None


def automatic(adaptive: bool = False) -> tuple[str, ...]:
    """Those that leave the user's optimizer as it is, and, where it is ``adaptive``, do not starve it."""
    ways = [spec for spec in CANDIDATES if not (_corrects(spec) or made_for_adamw(spec))]
    return tuple(spec for spec in ways if suits_adaptive(spec) or not adaptive)


def weighed(optimizer: str, across: bool = False) -> tuple[str, ...]:
    """What is predicted for an optimizer of this name; ``across``: compressed between hosts of several workers."""
    adamw = optimizer.lower() == "adamw" and not across
    return (*(spec for spec in CANDIDATES if adamw or not made_for_adamw(spec)), *PRESETS)


def made_for_adamw(spec: str) -> bool:
    """Whether a spec is for AdamW: it sends AdamW's momentum, or the difference that each worker's own step makes."""
    return local_rounds(spec) is not None or method(spec).feedback.needs_denominator


def suits_adaptive(spec: str) -> bool:
    """Whether an adaptive optimizer can follow a spec."""
    if made_for_adamw(spec.partition(";")[0]):
        return True
    whole = method(arguments(spec)[0])
    return not _corrects(spec) and not starves_adaptive(whole.last, whole.feedback, whole.exchange)


def _corrects(spec: str) -> bool:
    """Whether momentum is applied before compression; Adam has momentum of its own."""
    return isinstance(method(arguments(spec)[0]).feedback, MomentumCorrection)
