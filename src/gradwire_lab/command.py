"""Where the `gradwire` command begins: it names the extra that is missing before anything that needs it is imported."""

import sys


def run() -> None:
    """Run the command line."""
    try:
        from gradwire_lab.cli.main import app
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.startswith("gradwire"):
            raise
        sys.exit(f"gradwire: the command needs {missing.name}, which is not installed; pip install 'gradwire[lab]'")
    app()
