"""Fragments: which parameters are sent together."""

from collections.abc import Iterable
from fnmatch import fnmatchcase


def split_names(names: Iterable[str], fragments: int | tuple[str, ...]) -> list[list[str]]:
    """Deal layers to so many parts, one after the other; or give each name to the first pattern that fits it."""
    if isinstance(fragments, int):
        return _dealt(list(names), fragments)
    parts: list[list[str]] = [[] for _ in fragments]
    for name in names:
        fits = [i for i, pattern in enumerate(fragments) if fnmatchcase(name, pattern)]
        if not fits:
            raise ValueError(f"no pattern of fragments={fragments} fits {name!r}; add '*' as the last one")
        parts[fits[0]].append(name)
    idle = [pattern for pattern, part in zip(fragments, parts, strict=True) if not part]
    if idle:
        raise ValueError(f"the fragment {idle[0]!r} gets no parameter; correct it, or leave it out")
    return parts


def _dealt(names: list[str], count: int) -> list[list[str]]:
    layers = list(dict.fromkeys(_layer(name) for name in names))
    if count > len(layers):
        raise ValueError(f"fragments={count} are more than the {len(layers)} layers of the model; take fewer")
    place = {layer: i % count for i, layer in enumerate(layers)}
    return [[name for name in names if place[_layer(name)] == i] for i in range(count)]


def _layer(name: str) -> str:
    """``blocks.3`` of ``blocks.3.attention.weight``: up to a number, or else the module, if there is one."""
    words = name.split(".")
    numbers = [i for i, word in enumerate(words) if word.isdigit()]
    return ".".join(words[: numbers[0] + 1] if numbers else words[:-1] or words)
