"""User files: the files of a user's own that a run depends on, and what they held."""

import ast
import hashlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from gradwire.core import plugins
from gradwire.core.registry import registered
from gradwire_lab.train.recipe import Recipe


def hashes(paths: Iterable[Path]) -> dict[str, str]:
    """What some files hold, by name; of a Python file, also what it imports from its own folder."""
    return {str(path): _digest(sources(path.resolve())) for path in sorted(paths, key=str)}


def named_files(recipe: Recipe) -> list[Path]:
    """The Python files that a recipe depends on: ``mine.py`` of ``mine.py:make``, and those of ``--import``."""
    places = (text.rpartition(":")[0] for text in (recipe.model.name, recipe.data.name))
    return [Path(place) for place in places if place.endswith(".py")] + _plugin_files(recipe)


def data_beside(model: str) -> str:
    """``mine.py:data`` for a model ``mine.py:make`` whose file defines that function, else nothing. Nothing is run."""
    place = model.rpartition(":")[0]
    if not place.endswith(".py") or not Path(place).is_file():
        return ""
    defined = any(isinstance(node, ast.FunctionDef) and node.name == "data" for node in _tree(Path(place)).body)
    return f"{place}:data" if defined else ""


def _plugin_files(recipe: Recipe) -> list[Path]:
    """The files of ``--import`` that register a name which the recipe has, or none at all."""
    words = {*re.findall(r"\w+", recipe.model_dump_json())}
    found = []
    for path in plugins.files():
        module = plugins.load_file(path).__name__
        names = {name for name, made in registered().items() if made.__module__ == module}
        if not names or names & words:
            found.append(path)
    return found


def sources(path: Path) -> list[Path]:
    """A file, and the Python files of its folder that it imports, directly or through each other. Nothing is run."""
    found: list[Path] = []
    pending = [path]
    while pending:
        file = pending.pop()
        if file not in found and file.is_file():
            found.append(file)
            pending += _imported(file, path.parent) if file.suffix == ".py" else ()
    return sorted(found)


def _imported(file: Path, root: Path) -> Iterator[Path]:
    for node in ast.walk(_tree(file)):
        for start, parts in _module_paths(node, file, root):
            for end in range(1, len(parts) + 1):
                place = start.joinpath(*parts[:end])
                yield from (place.with_name(f"{place.name}.py"), place / "__init__.py")


def _tree(file: Path) -> ast.Module:
    """What a file holds; nothing, where Python cannot read it, since that is reported when the file is run."""
    try:
        return ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return ast.Module([], [])


def _module_paths(node: ast.AST, file: Path, root: Path) -> list[tuple[Path, list[str]]]:
    """Where the modules of an import would lie: a folder, and the parts of a dotted name."""
    if isinstance(node, ast.Import):
        return [(root, alias.name.split(".")) for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        start, before = file.parents[node.level - 1] if node.level else root, (node.module or "").split(".")
        return [(start, [*filter(None, before), alias.name]) for alias in node.names if alias.name != "*"] or [
            (start, before)
        ]
    return []


def _digest(files: Iterable[Path]) -> str:
    whole = hashlib.sha256()
    for file in files:
        whole.update(hashlib.sha256(file.read_bytes()).digest())
    return whole.hexdigest()
