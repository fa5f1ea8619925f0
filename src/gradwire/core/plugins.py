"""Plugins: modules of other people that register names: files, and entry points of the group ``gradwire.plugins``.

They are imported where a name is looked up that is not registered yet, and where all names are listed. So every process
of a job finds them, if it has the same packages and the same ``GRADWIRE_IMPORT``.
"""

import hashlib
import importlib.util
import os
import sys
import traceback
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType

VARIABLE = "GRADWIRE_IMPORT"  # files, separated like those of PATH
GROUP = "gradwire.plugins"

_modules: dict[Path, tuple[str, ModuleType]] = {}  # by file: what it held, and what came of it
_points: set[str] = set()


def load_file(path: Path) -> ModuleType:
    """Import a Python file; once, unless it has changed since. It may import other files of its folder.

    Raises:
        ValueError: There is no such file, or it cannot be imported; the message names the line.
    """
    place = path.resolve()
    if not place.is_file():
        raise ValueError(f"there is no file {path}; give a path from the current folder, as in mine.py")
    digest = hashlib.sha256(place.read_bytes()).hexdigest()
    if place not in _modules or _modules[place][0] != digest:
        _modules[place] = digest, _import(path, place)
    return _modules[place][1]


def load_plugins() -> None:
    """Import all plugins that are not imported yet."""
    for point in _installed(tuple((str(place), _changed(place)) for place in sys.path)):
        if point.value not in _points:
            _points.add(point.value)  # first: a plugin may look names up
            try:
                point.load()
            except Exception as error:
                text = f"the import of the plugin {point.name} ({point.value}) failed: {type(error).__name__}: {error}"
                raise ValueError(f"{text}; repair or uninstall its package") from error
    for path in files():
        if path.resolve() not in _modules:
            load_file(path)


@lru_cache(maxsize=1)
def _installed(places: tuple[tuple[str, int], ...]) -> tuple[EntryPoint, ...]:
    """The entry points of packages in these folders. To read them takes long: they are read when a folder changes."""
    return tuple(entry_points(group=GROUP))


def _changed(place: str) -> int:
    """When something was added to a folder, or removed, in nanoseconds."""
    try:
        return os.stat(place or ".").st_mtime_ns
    except OSError:
        return 0


def files() -> list[Path]:
    """The files that the environment names."""
    return [Path(name) for name in os.environ.get(VARIABLE, "").split(os.pathsep) if name]


def add_file(path: Path) -> None:
    """Import a file as a plugin, here and in all processes that this one starts from now on.

    Raises:
        ValueError: See `load_file`.
    """
    load_file(path)
    os.environ[VARIABLE] = os.pathsep.join(dict.fromkeys(map(str, [*files(), path.resolve()])))


def _import(path: Path, place: Path) -> ModuleType:
    name = f"{place.stem}_{hashlib.sha256(str(place).encode()).hexdigest()[:8]}"  # files may share their stem
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is no Python file; give one whose name ends in .py")
    if str(place.parent) not in sys.path:
        sys.path.append(str(place.parent))
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ValueError(f"the import of {path} failed: {_whereabouts(error, path)}") from error
    return module


def _whereabouts(error: Exception, path: Path) -> str:
    """An error, and the last line of the user's file on the way to it."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path.absolute())]
    line, what = (error.lineno, error.msg) if isinstance(error, SyntaxError) else (lines[-1] if lines else 0, error)
    return f"{f'line {line}: ' if line else ''}{type(error).__name__}: {what}"
