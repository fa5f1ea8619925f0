"""Chain: ``transform? | selector? | quantizer | index coder``, each stage in its slot."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeAlias

from gradwire.codecs.indices import Rice
from gradwire.codecs.quantizers import FP32
from gradwire.codecs.stage import IndexCoder, Quantizer, Selector, Stage, Transform

_ORDER = (Transform, Selector, Quantizer, IndexCoder)
_WORDS = ("transform", "selector", "quantizer", "index coder")


# The stage of each slot.
ResolvedStages: TypeAlias = tuple[Transform | None, Selector | None, Quantizer, IndexCoder | None]


def resolve_stages(stages: Sequence[Stage]) -> ResolvedStages:
    """Fill the slots in order; what is left out gets its default: fp32 values, Rice-coded indices.

    Raises:
        ValueError: The stages stand in the wrong order, or do not go together.
    """
    slots = [_slot(stage) for stage in stages]
    for i, (left, right) in enumerate(pairwise(slots)):
        if left >= right:
            raise ValueError(_refusal(stages[i], stages[i + 1], left, right))
    by_slot: dict[int, Any] = dict(zip(slots, stages, strict=True))
    transform, selector, coder = by_slot.get(0), by_slot.get(1), by_slot.get(3)
    sends_indices = selector is not None and not selector.receivers_redraw
    if coder is not None and not sends_indices:
        reason = f"all ranks can redraw {selector}" if selector else "every entry is sent"
        raise ValueError(f"{coder} has no indices to code: {reason}; leave {coder} out")
    if transform is not None and selector is not None and selector.memories:
        raise ValueError(
            f"{selector} remembers coordinates, which {transform} mixes differently at every step; drop one of them"
        )
    return transform, selector, by_slot.get(2, FP32()), coder or (Rice() if sends_indices else None)


def _slot(stage: Stage) -> int:
    for slot, kind in enumerate(_ORDER):
        if isinstance(stage, kind):
            return slot
    kind_name = getattr(stage, "kind", type(stage).__name__)
    raise ValueError(f"{stage} is of kind {kind_name}, which has no place in a chain of codec stages")


def _refusal(left: Stage, right: Stage, a: int, b: int) -> str:
    verb = "cannot follow another" if a == b else f"cannot follow the {_WORDS[a]}"
    order = "transform | selector | quantizer | index coder"
    return f"{left} | {right}: a {_WORDS[b]} {verb} {left if a != b else _WORDS[a]}; the order is {order}"
