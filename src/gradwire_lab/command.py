"""Where the `gradwire` command begins: it names the extra that is missing, where a package of it is."""

import sys
from typing import NoReturn

LAB = ("typer", "rich", "pydantic", "scipy", "sklearn")  # what the extra installs, as it is imported


def run() -> None:
    """Run the command line."""
    try:
        from gradwire_lab.cli.main import app
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.startswith("gradwire"):
            raise
        _refuse(missing.name)
    try:
        app()  # which imports the module of a command, and with it what that needs
    except ModuleNotFoundError as missing:
        name = (missing.name or "").partition(".")[0]
        if name not in LAB:
            raise
        _refuse(name)


def _refuse(name: str) -> NoReturn:
    sys.exit(f"gradwire: the command needs {name}, which is not installed; pip install 'gradwire[lab]'")
