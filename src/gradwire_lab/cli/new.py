"""``gradwire new codec NAME``: a file to begin with."""

import re
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from gradwire.core.registry import registered
from gradwire_lab.cli.output import refusing


def codec(
    name: Annotated[str, typer.Argument(help="Its name in specs: letters, digits and underscores.")],
    folder: Annotated[Path, typer.Option(help="Where the file goes.")] = Path("."),
) -> None:
    """Write NAME.py: a quantizer that works, with its card, to be changed into your own."""
    with refusing("new codec", ValueError, OSError):
        path = folder / f"{name}.py"
        if not re.fullmatch(r"[a-z]\w*", name):
            raise ValueError(f"{name!r} is no name of a spec; write small letters, digits and underscores")
        if name in registered():
            raise ValueError(f"there is a {name!r} already; pick another name")
        if path.exists():
            raise ValueError(f"{path} is there already; pick another name or --folder")
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(codec_text(name), encoding="utf-8")
    typer.echo(str(path))
    typer.echo(f"what it costs:  gradwire show 'topk(0.01) | {name}' --import {path}")
    typer.echo(f"its laws:       GRADWIRE_IMPORT={path.resolve()} pytest tests/laws -k {name}   # in a checkout")


def codec_text(name: str) -> str:
    """The file of a quantizer of this name."""
    text = (resources.files("gradwire_lab.cli") / "new_codec.txt").read_text(encoding="utf-8")
    words = {"@name@": name, "@Title@": name.capitalize(), "@Class@": name.title().replace("_", "")}
    for mark, word in words.items():
        text = text.replace(mark, word)
    return text
