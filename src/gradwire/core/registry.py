"""The one registry: every name that may stand in a spec."""

import difflib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

from gradwire.core.plugins import load_plugins

# Kinds of things that have a name: which slot of a spec they may fill.
KINDS = (
    *("transform", "selector", "quantizer", "indices", "feedback", "exchange", "preset"),
    *("topology", "gossip", "local"),
)

T = TypeVar("T")
_ENTRIES: dict[str, tuple[str, Callable[..., object]]] = {}


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def register(name: str, kind: str) -> Callable[[T], T]:
    """Decorator: give a stage its name in specs, and make its class a frozen dataclass, if it is none yet.

    A file that is imported again, or a cell of a notebook that is run again, replaces what it registered before.

    Raises:
        ValueError: The name is registered already, or the class lacks a method.
    """
    assert kind in KINDS, kind

    def enter(entry: T) -> T:
        if name in _ENTRIES and _origin(_ENTRIES[name][1]) != _origin(entry):
            raise ValueError(f"the name {name!r} is registered twice; pick another for {entry!r}")
        if lacking := sorted(getattr(entry, "__abstractmethods__", ())):
            missing, example = " and ".join(lacking), "; write for example traits = Traits()" * ("traits" in lacking)
            raise ValueError(f"{entry!r} lacks {missing}, which every {kind} has{example}")
        if isinstance(entry, type) and "__dataclass_fields__" not in vars(entry):
            dataclass(frozen=True)(entry)
        assert callable(entry)
        entry.name, entry.kind = name, kind  # type: ignore[attr-defined]
        _ENTRIES[name] = (kind, entry)
        return entry

    return enter


def _origin(entry: object) -> tuple[str, str]:
    """The file or module that defines an entry, and the entry's name there."""
    module, name = getattr(entry, "__module__", ""), getattr(entry, "__qualname__", repr(entry))
    return getattr(sys.modules.get(module), "__file__", None) or module, name


def lookup(name: str) -> tuple[str, Callable[..., object]]:
    """The kind and maker registered under a name, or a sentence with the nearest ones."""
    if name not in _ENTRIES:
        load_plugins()
    if name not in _ENTRIES:
        plain = name.lower().replace("-", "_")
        near = [plain] if plain in _ENTRIES else difflib.get_close_matches(plain, _ENTRIES, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "see `gradwire codecs`."
        raise ValueError(
            f"there is nothing called {name!r}; {hint} A name of your own: import the module that registers it, or "
            "--import FILE.py"
        )
    return _ENTRIES[name]


def registered(*kinds: str) -> dict[str, Callable[..., object]]:
    """Everything registered, or everything of some kinds, by name."""
    load_plugins()
    return {name: made for name, (kind, made) in _ENTRIES.items() if not kinds or kind in kinds}


def card(made: Callable[..., object]) -> str:
    """The docstring that holds the card of a registered class: its own, or that of its module."""
    own = inspect.getdoc(made) or ""
    return own if "\nFormula:" in own else inspect.getdoc(sys.modules[made.__module__]) or ""
