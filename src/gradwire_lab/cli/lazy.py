"""Commands whose modules are imported when they are run, so that help, completion and mistakes come without torch."""

import ast
import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup

from gradwire_lab.cli import options as shared

Imports = Annotated[
    list[Path] | None,
    typer.Option("--import", help="Import a file that registers your codecs: my_codec.py. May be repeated."),
]
# Help without boxes: it takes half the time, and all of a narrow terminal.
PLAIN: dict[str, Any] = {"pretty_exceptions_enable": False, "rich_markup_mode": None}


class LazyGroup(TyperGroup):
    """A group whose commands stand in a table. A command's module is imported when the command is run.

    Attributes:
        table: The function behind each command, as ``module:function`` below this package.
        settings: Of click's contexts, for commands that need any.
    """

    table: ClassVar[Mapping[str, str]]
    settings: ClassVar[Mapping[str, dict[str, Any]]] = {}

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = {**{name: TyperCommand(name) for name in self.table}, **self.commands}

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.table:
            return super().get_command(ctx, cmd_name)
        command = _outline(self.table[cmd_name])
        alone = typer.Typer(add_completion=False, **PLAIN)
        raw = self.settings.get(cmd_name)
        alone.command(cmd_name, context_settings=raw)(command if raw else _with_import(command, cmd_name))
        return typer.main.get_command(alone)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """First paragraphs in full; click cuts them."""
        texts = {name: self.get_command(ctx, name).help or "" for name in self.list_commands(ctx)}
        with formatter.section("Commands"):
            formatter.write_dl([(name, " ".join(text.partition("\n\n")[0].split())) for name, text in texts.items()])


def _outline(place: str) -> Callable[..., None]:
    """A function's signature and docstring, read from its source; a call imports its module, and calls it.

    What stands in the signature is Python's, typer's, or an option of `gradwire_lab.cli.options`.
    """
    module, _, name = place.partition(":")
    path = Path(__file__).with_name(f"{module}.py")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    (function,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    function.body = function.body[:1]  # the docstring
    names: dict[str, Any] = {**vars(shared), "Annotated": Annotated, "Path": Path, "typer": typer}
    exec(compile(ast.Module([function], []), str(path), "exec"), names)

    @wraps(names[name])
    def command(**options: Any) -> None:
        getattr(importlib.import_module(f"gradwire_lab.cli.{module}"), name)(**options)

    return command


def _with_import(function: Callable[..., None], name: str) -> Callable[..., None]:
    """The same command with the option ``--import``, whose files are imported before it."""

    @wraps(function)
    def command(*args: Any, imports: list[Path] | None = None, **options: Any) -> None:
        from gradwire.core.plugins import add_file  # and with it all names of the package
        from gradwire_lab.cli.output import refusing

        with refusing(name, ValueError, OSError):
            for file in imports or ():
                add_file(file)
        function(*args, **options)

    known = inspect.signature(function)
    option = inspect.Parameter("imports", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Imports)
    command.__signature__ = known.replace(parameters=[*known.parameters.values(), option])  # type: ignore[attr-defined]
    command.__annotations__ = {**function.__annotations__, "imports": Imports}
    return command
