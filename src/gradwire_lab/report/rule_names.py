"""Names of rules: which tensors a rule is for, in words instead of the label that logs hold."""

import re

_BOUND = re.compile(r"(dim|size)(<=|>=)(\d+)")


def in_words(label: str, alone: bool) -> str:
    """A rule's label, as ``dim<=1`` or ``head.* size>=1000``, in words.

    Args:
        label: As the rule has it; ``*`` is for all tensors that no other rule took.
        alone: Whether no other rule is shown with it.
    """
    if label == "*":
        return "all tensors" if alone else "all other tensors"
    if label == "dim<=1":
        return "1-D tensors (biases, norms)"
    parts = label.split(" ")
    named = " ".join(part for part in parts if not _BOUND.fullmatch(part)) or "tensors"
    bounds = [_bound(*found.groups()) for part in parts if (found := _BOUND.fullmatch(part))]
    return " ".join((named, *([f"of {' and '.join(bounds)}"] if bounds else [])))


def _bound(what: str, sign: str, number: str) -> str:
    unit = "dimensions" if what == "dim" else "elements"
    return f"{int(number):,} {unit} or {'fewer' if sign == '<=' else 'more'}"
