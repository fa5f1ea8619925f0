"""Warnings that point at the user's own line, also under a trainer, and a warning of a long start."""

import sys
import warnings
from types import FrameType

SHARE = 0.15  # of a training: its start
FEWEST = 100  # steps of a start that measures a variance, however short the training is
_PACKAGES = {"gradwire", "transformers", "accelerate", "lightning", "pytorch_lightning", "torch", "contextlib"}


def warn_user(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn with the innermost line that is neither gradwire's nor a trainer's."""
    frame: FrameType | None = sys._getframe()
    level = 1
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _PACKAGES:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


def warn_long_start(start: int, max_steps: float, spec: object, fewest: int = 1) -> None:
    """Warn of a training that ends in its start, which was meant to be its first steps.

    Args:
        start: How many steps.
        max_steps: Of the training; not above 0, if it is not known.
        spec: That has the start.
        fewest: Steps that a start of its kind should have.
    """
    if 0 < max_steps <= start:
        warn_user(
            f"the start of {str(spec)!r} takes {start} of {max_steps} steps, so that the training never leaves it; "
            f"{_remedy(max_steps, fewest)}"
        )


def _remedy(max_steps: float, fewest: int) -> str:
    """A start by the rule of docs/adamw.md; or another spec, where that would be most of the training."""
    share = max(fewest, int(SHARE * max_steps))
    rule = f"{100 * SHARE:.0f} % of the training" + f", but no fewer than {fewest} steps" * (fewest > 1)
    if share > max(1, max_steps / 2):
        return f"a start should be {rule}: train for longer, or take int4, which has no start"
    return f"write a shorter one, such as start={share}, into the spec: {rule}"
