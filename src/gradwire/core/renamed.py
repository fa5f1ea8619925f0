"""Old names: they work for one release, with a warning."""

import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from operator import attrgetter
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


def renamed_attributes(names: Mapping[str, str]) -> Callable[[type[T]], type[T]]:
    """A class some of whose attributes have changed their names: new ones, which may have dots, by old ones.

    A subclass may define an attribute by its old name, too.
    """

    def __getattr__(self: Any, name: str) -> Any:
        kind = type(self).__name__
        if name not in names:
            raise AttributeError(f"{kind!r} object has no attribute {name!r}")
        warnings.warn(f"{kind}.{name} is now {names[name]}", DeprecationWarning, stacklevel=2)
        return attrgetter(names[name])(self)

    def __init_subclass__(cls: type) -> None:
        for old in [name for name in names if name in vars(cls)]:
            warnings.warn(f"{cls.__name__}.{old} is now {names[old]}", DeprecationWarning, stacklevel=2)
            setattr(cls, names[old], vars(cls)[old])

    def decorate(cls: type[T]) -> type[T]:
        cls.__getattr__ = __getattr__  # type: ignore[attr-defined]
        cls.__init_subclass__ = classmethod(__init_subclass__)  # type: ignore[assignment]
        return cls

    return decorate


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
