"""Names that may stand in a path."""

import re
from collections.abc import Iterable
from pathlib import Path

USUAL = ("digits",)  # the recipe, where none is named


def slug(text: str) -> str:
    """Letters, digits, dots and single dashes: ``topk(0.01) | sign`` is ``topk-0.01-sign``."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-.").lower()


def run_title(recipes: Iterable[str], model: str = "") -> str:
    """What a run of these recipes is called; without a recipe, the file of the model names it."""
    named = "+".join(Path(name).stem if name.endswith(".toml") else name for name in recipes)
    return named or Path(model.partition(":")[0]).stem or "+".join(USUAL)
