"""What runs are called."""

from collections.abc import Sequence
from pathlib import Path


def title(recipes: Sequence[str]) -> str:
    """What a run of these recipes is called."""
    return "+".join(Path(name).stem if name.endswith(".toml") else name for name in recipes)
