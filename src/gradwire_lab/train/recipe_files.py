"""Recipe files: where recipes lie, how several make one, and how one is written.

A file may have ``about`` (one line), ``fragment = true`` (it adds to a recipe, but is none by itself) and
``extends = [...]``, whose files come before it. Later files win, key by key, and overrides come last;
``model.options`` of another model and ``data.options`` of another data set are dropped. Milestones or points without
``schedule.epochs`` are epochs of the run: the ``schedule.epochs`` of an earlier file is dropped.
"""

import difflib
import json
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, reduce
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple, cast

from gradwire_lab.train.call_with_options import nearest
from gradwire_lab.train.recipe import TABLES, Recipe, read, validate

Tables = dict[str, Any]
CODE_TABLES = ("model", "data")  # whose names may be Python files
WORDS = ("about", "fragment", "extends")


class Entry(NamedTuple):
    """One recipe file, unmerged."""

    name: str
    about: str
    fragment: bool
    extends: tuple[str, ...]
    tables: Tables


@cache
def registered() -> dict[str, Entry]:
    """All recipes and fragments of the package, by name."""
    folder = resources.files("gradwire_lab.train") / "recipes"
    files = {file.name[:-5]: file for file in folder.iterdir() if file.name.endswith(".toml")}
    return {name: _entry(name, file.read_text(encoding="utf-8")) for name, file in sorted(files.items())}


def find(name: str) -> Entry:
    """A file of the package by name, or any file by a path that ends in .toml."""
    if name.endswith(".toml"):
        path = Path(name)
        if not path.is_file():
            raise ValueError(f"there is no recipe file {name}; give a path from the current folder")
        return _entry(path.stem, path.read_text(encoding="utf-8"))
    if name not in registered():
        raise ValueError(f"there is no recipe called {name!r}; {_hint(name)}")
    return registered()[name]


def toml_files(names: Iterable[str]) -> list[Path]:
    """The files of the user's own among some recipes, and among those that they extend."""
    own = [name for name in names if name.endswith(".toml")]
    return [*map(Path, own), *(file for name in own for file in toml_files(find(name).extends))]


def resolve(names: Sequence[str], overrides: Iterable[str] = (), allow_code: bool = False) -> Recipe:
    """Merge recipes and fragments in order, then overrides such as ``train.epochs=5``, and check the outcome.

    A Python file that a recipe names is run only if ``allow_code``; one that an override names is run.
    """
    entries = [find(name) for name in names]
    if entries and all(entry.fragment for entry in entries):
        words = " ".join(names)
        raise ValueError(f"{words} only adds to a recipe; name one before, as in: gradwire train digits {words}")
    merged: Tables = reduce(_over, (_whole(entry, ()) for entry in entries), {})
    given = [_override(text) for text in overrides]
    typed: Tables = reduce(_merge, given, {})
    _refuse_code(merged, f"the recipe {' '.join(names)}", allow_code, typed)
    return read(reduce(_merge, given, _unstretched(merged, typed)))


def dumps(recipe: Recipe) -> str:
    """A recipe as TOML that reads back as itself."""
    lines = []
    for name, table in recipe.model_dump().items():
        lines += [f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in table.items()), ""]
    return "\n".join(lines)


def load(path: Path, model: str = "", root: str = "", allow_code: bool = False) -> Recipe:
    """A recipe that `dumps` wrote into the folder of a run.

    A Python file that it names is run only if ``allow_code``; a ``model``, or a ``root`` of data, that is given takes
    the place of the recipe's.
    """
    tables = _parsed(path)
    typed: Tables = ({"model": {"name": model}} if model else {}) | ({"data": {"root": root}} if root else {})
    _refuse_code(tables, f"the run {path.parent}", allow_code, typed)
    for own in (tables.get(table) for table in CODE_TABLES if "name" not in typed.get(table, {})):
        if isinstance(own, dict) and ".py:" in str(own.get("name")):
            own["name"] = _reached(str(own["name"]), path.parent)
    return _named(path, read, _merge(tables, typed))


def load_inert(path: Path) -> Recipe:
    """The same for comparison only: nothing that it names is run."""
    return _named(path, validate, _parsed(path))


def _parsed(path: Path) -> Tables:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"cannot read {path}: {error}; `gradwire plan RECIPE... --toml` prints such a file") from None


def _named(path: Path, make: Callable[[Tables], Recipe], tables: Tables) -> Recipe:
    try:
        return make(tables)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _refuse_code(tables: Tables, who: str, allow_code: bool, typed: Tables) -> None:
    """Refuse a model or data that would run code which the command line has not named."""
    for table in CODE_TABLES:
        own = tables.get(table)
        name = str(own.get("name", "")) if isinstance(own, Mapping) and "name" not in typed.get(table, {}) else ""
        place, colon, _ = name.rpartition(":")
        option = f"--model {name}" if table == "model" else f"--set {table}.name={name}"
        if colon and not place.endswith(".py"):
            raise ValueError(
                f"{who} names the {table} {name}, and functions of modules are named on the command line alone; add "
                f"{option} if you trust it"
            )
        if colon and not allow_code:
            raise ValueError(
                f"{who} names the {table} {name}, a file that would be run; add --allow-code if you trust it, or name "
                f"it with {option}"
            )


def _reached(own: str, run: Path) -> str:
    """A user's own model or data, as they can be named here: the file may lie in the run's folder, or next to it."""
    file, _, maker = own.rpartition(":")
    for path in (run / Path(file).name, Path(file), *(folder / file for folder in run.resolve().parents[:2])):
        if path.is_file():
            return f"{path}:{maker}"
    raise ValueError(
        f"{run} was trained with {own}, and there is no {file} here, nor next to the run; run this in the "
        f"folder where it was trained, or copy {Path(file).name} into {run}"
    )


# -- reading -----------------------------------------------------------------------------------------------------------


def _entry(name: str, text: str) -> Entry:
    try:
        raw = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ValueError(f"the recipe {name} is not TOML: {error}") from None
    for word in raw:
        if word not in (*WORDS, *TABLES):
            raise ValueError(f"the recipe {name} has no {word!r}; {nearest(word, (*WORDS, *TABLES))}")
    tables = {word: raw[word] for word in raw if word in TABLES}
    about, fragment, extends = raw.get("about", ""), raw.get("fragment", False), raw.get("extends", [])
    listed = isinstance(extends, list) and all(isinstance(each, str) for each in extends)
    if not (listed and isinstance(about, str) and isinstance(fragment, bool)):
        raise ValueError(
            f"the recipe {name} must have about = 'one line', fragment = true or false, and extends = ['digits']"
        )
    return Entry(name, about, fragment, tuple(extends), tables)


def _whole(entry: Entry, above: tuple[str, ...]) -> Tables:
    """An entry with all that it extends."""
    if entry.name in above:
        raise ValueError(f"recipes extend one another in a circle: {' -> '.join((*above, entry.name))}")
    extended = (_whole(find(name), (*above, entry.name)) for name in entry.extends)
    return reduce(_over, (*extended, entry.tables), {})


def _over(base: Tables, more: Tables) -> Tables:
    """One file over those before it."""
    return _merge(_unstretched(base, more), more)


def _unstretched(base: Tables, more: Tables) -> Tables:
    """Without the length that a schedule was written for, where ``more`` has a schedule of its own."""
    old, new = base.get("schedule"), more.get("schedule")
    own = isinstance(new, Mapping) and "epochs" not in new and ("milestones" in new or "points" in new)
    if own and isinstance(old, Mapping):
        return {**base, "schedule": {key: value for key, value in old.items() if key != "epochs"}}
    return base


def _merge(base: Mapping[str, Any], more: Mapping[str, Any]) -> Tables:
    merged = dict(base)
    for name, table in more.items():
        old = merged.get(name, {})
        if not isinstance(table, Mapping) or not isinstance(old, Mapping):
            merged[name] = table
            continue
        if "name" in old and table.get("name", old["name"]) != old["name"]:
            old = {key: value for key, value in old.items() if key != "options"}
        merged[name] = _merge(old, table)
    return merged


def _override(text: str) -> Tables:
    path, equals, value = text.partition("=")
    keys = path.strip().split(".")
    if not equals or len(keys) < 2 or not all(keys):
        lacks = "no value" if not equals else "no table of the recipe"
        raise ValueError(f"{text!r} names {lacks}; write table.key=value, as in train.epochs=500")
    if keys[0] not in TABLES:
        raise ValueError(f"a recipe has no table [{keys[0]}]; {nearest(keys[0], TABLES)}")
    tables: Any = _literal(value.strip())
    for key in reversed(keys):
        tables = {key: tables}
    return cast(Tables, tables)


def _literal(text: str) -> Any:
    """A value of TOML; anything else is a string without its quotes."""
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return text


def _hint(name: str) -> str:
    from gradwire_lab.train.models import MODELS  # late: reading recipes needs no models

    if any(sign in name for sign in "()|"):
        return f"if it is a spec, write --set 'sync.spec={name}'"
    if name.endswith(".py"):
        return f"a model of your own is named with its function: --model {name}:make"
    if name in MODELS:
        return f"it is a model: write --model {name}, or `gradwire recipes` lists recipes"
    near = difflib.get_close_matches(name, registered(), n=1)
    return f"did you mean {near[0]!r}?" if near else "see `gradwire recipes`"


def _toml(value: object) -> str:
    if isinstance(value, Mapping):
        pairs = (f"{json.dumps(str(key))} = {_toml(each)}" for key, each in value.items() if each is not None)
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)  # numbers, booleans and strings are written alike
