"""Old names: they work for one release, with a warning."""

import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


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


def renamed_argument(old: str, new: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A function one of whose keywords has changed its name."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            if old in kwargs:
                warnings.warn(f"{old}= is now {new}=", DeprecationWarning, stacklevel=2)
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return call

    return decorate
