"""``gradwire new codec NAME``, and the same for other kinds of names: a file to begin with."""

import re
from importlib import resources
from keyword import iskeyword
from pathlib import Path

import typer

from gradwire.core.registry import registered
from gradwire_lab.cli.options import NewFolder, NewName
from gradwire_lab.cli.output import refusing


def codec(name: NewName, folder: NewFolder = Path(".")) -> None:
    """Write NAME.py: a quantizer that works, with its card. Change it into your own."""
    _write("codec", name, folder, f"'topk(0.01) | {name}'")


def selector(name: NewName, folder: NewFolder = Path(".")) -> None:
    """Write NAME.py: a selector that works, with its card. Change it into your own."""
    _write("selector", name, folder, f"'{name}(16) | sign'")


def transform(name: NewName, folder: NewFolder = Path(".")) -> None:
    """Write NAME.py: a transform that works, with its card. Change it into your own."""
    _write("transform", name, folder, f"'{name} | sign(per=64)'")


def exchange(name: NewName, folder: NewFolder = Path(".")) -> None:
    """Write NAME.py: an exchange that works, with its card. Change it into your own."""
    _write("exchange", name, folder, f"int4 --exchange {name}")


def feedback(name: NewName, folder: NewFolder = Path(".")) -> None:
    """Write NAME.py: a feedback that works, with its card. Change it into your own."""
    _write("feedback", name, folder, f"'topk(0.01)' --feedback {name}")


def _write(kind: str, name: str, folder: Path, shown: str) -> None:
    """Write the file, and print the commands that show it and run its laws."""
    with refusing(f"new {kind}", ValueError, OSError):
        path = folder / f"{name}.py"
        if not re.fullmatch(r"[a-z]\w*", name):
            raise ValueError(f"{name!r} may not stand in a spec; write small letters, digits and underscores")
        if iskeyword(_class_name(name)):
            raise ValueError(f"{_class_name(name)} is a word of Python and no name of a class; pick another name")
        if name in registered():
            raise ValueError(f"the name {name!r} is taken already; pick another name")
        if path.exists():
            raise ValueError(f"{path} is there already; pick another name or --folder")
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(file_text(kind, name), encoding="utf-8")
    typer.echo(str(path))
    typer.echo(f"what it costs:  gradwire show {shown} --import {path}")
    typer.echo(f"its laws:       GRADWIRE_IMPORT={path.resolve()} pytest tests/laws --own   # in a checkout")


def file_text(kind: str, name: str) -> str:
    """The file of a codec, selector, transform, exchange or feedback of this name."""
    text = (resources.files("gradwire_lab.cli") / f"new_{kind}.txt").read_text(encoding="utf-8")
    words = {"@name@": name, "@Title@": name.capitalize(), "@Class@": _class_name(name)}
    for mark, word in words.items():
        text = text.replace(mark, word)
    return text


def _class_name(name: str) -> str:
    return name.title().replace("_", "")
