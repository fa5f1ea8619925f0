"""Warnings that point at the user's own line, also under a trainer, and what is wrong with a start."""

import math
import sys
import warnings
from types import FrameType

from gradwire.engine.presets import FEWEST_START, START_SHARE

_SHORT = 0.1  # of a training: what a shorter start cost is in docs/adamw.md
_PACKAGES = {"gradwire", "transformers", "accelerate", "lightning", "pytorch_lightning", "torch", "contextlib"}


def warn_user(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn with the innermost line that is neither gradwire's nor a trainer's."""
    frame: FrameType | None = sys._getframe()
    level = 1
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _PACKAGES:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


def warn_of_start(start: int, max_steps: float, spec: object, measures: bool = True) -> None:
    """Warn of a start that is too long or too short for the training; see `start_problem`."""
    if problem := start_problem(start, max_steps, repr(str(spec)), "the spec", measures):
        warn_user(problem)


def start_problem(start: int, max_steps: float, what: str, where: str, measures: bool) -> str:
    """What is wrong with a start: the training ends in it, or its variance is of too few steps. Empty if nothing is.

    Args:
        start: How many steps; 0: there is none.
        max_steps: Of the training; not above 0, or infinite, if it is not known.
        what: Has the start.
        where: Another length is to be written.
        measures: Whether a variance is measured in it, so that it may not be too short.
    """
    if not start or not 0 < max_steps < math.inf:
        return ""
    fewest = FEWEST_START if measures else 1
    share = max(fewest, round(START_SHARE * max_steps))
    rule = f"{100 * START_SHARE:.0f} % of the training" + f", but no fewer than {fewest} steps" * measures
    told = f"the start of {what} takes {start:,} of {max_steps:,.0f} steps"
    remedy = f"write start={share} into {where}: {rule}"
    if share > max(1, max_steps / 2):
        remedy = f"a start should be {rule}: train for longer, or take int4, which has no start"
    if start >= max_steps:
        return f"{told}, so that the training never leaves it; {remedy}"
    if measures and start < _SHORT * max_steps:
        cost = "with onebit_adam, one of 5 % and less cost 3 to 5 % of the loss, and one of 10 % up to 2 %"
        return f"{told}, which is {100 * start / max_steps:.2g} %; {cost}; {remedy}"
    return ""
