"""Makers: functions that a recipe names, called with its options and with facts of the data."""

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from gradwire.core.plugins import load_file

T = TypeVar("T")


def nearest(word: str, words: Iterable[str]) -> str:
    """The end of an error about an unknown word: the nearest known word, or all of them."""
    words = list(words)
    near = difflib.get_close_matches(word, words, n=1)
    return f"did you mean {near[0]!r}?" if near else f"choose among {', '.join(words) or 'none at all'}"


def load_function(text: str) -> Callable[..., Any]:
    """The function of ``file.py:make`` or ``package.module:make``.

    Raises:
        ValueError: There is none, or a file only imports it.
    """
    place, _, name = text.rpartition(":")
    module = load_file(Path(place)) if place.endswith(".py") else _module(place)
    maker: object = getattr(module, name, None)
    if not callable(maker):
        raise ValueError(f"{place} has no function called {name!r}; name one that it defines, as in {place}:make")
    named = inspect.isroutine(maker) or inspect.isclass(maker)
    if place.endswith(".py") and named and getattr(maker, "__module__", None) != module.__name__:
        raise ValueError(f"{place} only imports {name!r}; name a function that the file itself defines")
    return maker


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"the module {error.name} is not installed; install it, or name a file as in mine.py:make"
        ) from None


def call_with_options(
    maker: Callable[..., T], table: str, name: str, options: Mapping[str, object], facts: Mapping[str, object]
) -> T:
    """``maker(**facts, **options)``: every option must be a keyword of the maker, a fact is left out if it is not.

    Options win over facts. A maker with ``**keywords`` takes any option. An option must be of the type that the maker
    declares, where that is a number, a switch or a string. Options are those of a recipe's ``table``.
    """
    what = f"the {table} {name}"
    known = inspect.signature(maker).parameters
    words = {word: each for word, each in known.items() if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    open_ended = any(each.kind is each.VAR_KEYWORD for each in known.values())
    for word in options:
        if word not in words and not open_ended:
            raise ValueError(f"{what} has no option called {word!r}; {nearest(word, words)}")
        if word in words and not _fits(options[word], words[word].annotation):
            kind = words[word].annotation.__name__
            raise ValueError(f"{what} takes no {word} = {options[word]!r}; it must be of type {kind}")
    given = {**{word: fact for word, fact in facts.items() if word in words}, **options}
    for word, each in words.items():
        if each.default is each.empty and word not in given:
            remedy = f"give it with --set {table}.options.{word}={word.upper()}"
            raise ValueError(f"{what} needs the option {word!r}; {remedy}")
    return maker(**given)


def _fits(value: object, annotation: object) -> bool:
    """Whether a value is of an annotated type, if that is a plain one."""
    if annotation in (int, float):
        return isinstance(value, int | annotation) and not isinstance(value, bool)
    return not (annotation is bool or annotation is str) or type(value) is annotation
