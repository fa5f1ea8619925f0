"""Warnings that point at the line of the user, who may have called a trainer; and one of what a training will do."""

import sys
import warnings
from types import FrameType

_PACKAGES = {"gradwire", "transformers", "accelerate", "lightning", "pytorch_lightning", "torch", "contextlib"}


def warn_user(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn of the innermost line that is neither ours nor a trainer's."""
    frame: FrameType | None = sys._getframe()
    level = 1
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _PACKAGES:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


def warn_long_start(start: int, max_steps: float, spec: object) -> None:
    """Warn of a training that ends in its start, which was meant to be its first steps.

    Args:
        start: How many steps.
        max_steps: Of the training; not above 0, if it is not known.
        spec: That has the start.
    """
    if 0 < max_steps <= start:
        warn_user(
            f"the start of {str(spec)!r} takes {start} of {max_steps} steps, so that the training never leaves it; "
            f"write a shorter one, such as start={max(1, int(max_steps) // 10)}, into the spec"
        )
