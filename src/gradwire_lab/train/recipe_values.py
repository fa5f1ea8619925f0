"""Recipe values: what a recipe may hold, whatever the key."""

from collections.abc import Mapping

LARGEST = 2**63
LARGEST_FLOAT = 2.0**128


def refuse_odd(value: object, path: str = "") -> None:
    """Refuse dates, floats that are not finite in float32, and integers of more than 64 bits.

    Raises:
        ValueError: The message names the key.
    """
    if isinstance(value, Mapping | list):
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, each in pairs:
            refuse_odd(each, f"{path}.{key}" if path else str(key))
    elif isinstance(value, int | float):
        if not abs(value) < (LARGEST_FLOAT if isinstance(value, float) else LARGEST):
            raise ValueError(f"{path} = {value} cannot be: a number must fit into float32, an integer into 64 bits")
    elif value is not None and not isinstance(value, str):
        raise ValueError(f"{path} = {value} cannot be: write a number, a text, true or false, a list or a table")
