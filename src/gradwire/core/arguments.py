"""Arguments: what numbers in a spec may be. A bool is an int to Python, but not here."""

import math
from typing import Any


def is_number(value: object) -> bool:
    """Whether an argument is a finite int or float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf


def is_count(value: object, least: int = 1) -> bool:
    """Whether an argument is a whole number from ``least``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check_argument(stage: Any, name: str, valid: bool, wanted: str) -> None:
    """Refuse an argument of a stage.

    Raises:
        ValueError: It is not valid. The message names the stage and the argument, and says what is wanted.
    """
    if not valid:
        raise ValueError(f"{stage}: {name}={getattr(stage, name)!r} must be {wanted}")


def check_fraction(stage: Any, name: str, example: str) -> None:
    """Refuse an argument that is no number in (0, 1]."""
    value = getattr(stage, name)
    check_argument(stage, name, is_number(value) and 0 < value <= 1, f"in (0, 1], for example {example}")
