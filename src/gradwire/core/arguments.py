"""Arguments: what numbers in a spec may be. A bool is an int to Python, but not here."""

import math


def is_number(value: object) -> bool:
    """Whether an argument is a finite int or float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf


def is_fraction(value: float) -> bool:
    """Whether an argument is a number in (0, 1]."""
    return is_number(value) and 0 < value <= 1


def is_count(value: object, least: int = 1) -> bool:
    """Whether an argument is a whole number from ``least``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
