"""Recipe values: what a recipe may hold, whatever the key."""

import warnings
from collections.abc import Mapping
from typing import Any

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
            raise ValueError(f"{path} = {value} is refused: a number must fit into float32, an integer into 64 bits")
    elif value is not None and not isinstance(value, str):
        raise ValueError(f"{path} = {value} is refused: write a number, a text, true or false, a list or a table")


def with_new_keys(tables: dict[str, Any]) -> dict[str, Any]:
    """The same tables with the new name of a key that was renamed."""
    sync = tables.get("sync")
    if not isinstance(sync, Mapping) or "launch_mb" not in sync:
        return tables
    warnings.warn("launch_mb in [sync] is now bucket_mb", FutureWarning, stacklevel=2)
    rest = {key: value for key, value in sync.items() if key != "launch_mb"}
    return {**tables, "sync": {"bucket_mb": sync["launch_mb"], **rest}}
