"""Names that may stand in a path."""

import re


def slug(text: str) -> str:
    """Letters, digits, dots and single dashes: ``topk(0.01) | sign`` is ``topk-0.01-sign``."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-.").lower()
