"""Old names: they work for one release, with a warning."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any


def renamed(names: Mapping[str, str], namespace: Mapping[str, Any]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a module, for names that have changed.

    Args:
        names: New names by old ones.
        namespace: The module's ``globals()``.
    """

    def __getattr__(name: str) -> Any:
        module = namespace["__name__"]
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warnings.warn(f"{module}.{name} is now {module}.{names[name]}", DeprecationWarning, stacklevel=2)
        return namespace[names[name]]

    return __getattr__
