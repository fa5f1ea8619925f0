"""Names that may stand in a path."""

import re
from collections.abc import Iterable
from pathlib import Path


def slug(text: str) -> str:
    """Letters, digits, dots and single dashes: ``topk(0.01) | sign`` is ``topk-0.01-sign``."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-.").lower()


def run_title(recipes: Iterable[str]) -> str:
    """What a run of these recipes is called."""
    return "+".join(Path(name).stem if name.endswith(".toml") else name for name in recipes)
