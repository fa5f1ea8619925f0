"""Commands that are imported when they are run, so that help and version come without torch."""

import ast
import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup

Imports = Annotated[
    list[Path] | None,
    typer.Option("--import", help="A file of yours that registers codecs and the like: my_codec.py; several."),
]


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
        self.commands.update({name: TyperCommand(name) for name in self.table})

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in self.table:
            self.commands[args[0]] = self._load(args[0])
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        for name, place in self.table.items():
            self.commands[name].help = _first_paragraph(place)
        super().format_help(ctx, formatter)

    def _load(self, name: str) -> Any:
        module, _, function = self.table[name].partition(":")
        command = getattr(importlib.import_module(f"gradwire_lab.cli.{module}"), function)
        alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        raw = self.settings.get(name)
        alone.command(name, context_settings=raw)(command if raw else _with_import(command, name))
        return typer.main.get_command(alone)


def _first_paragraph(place: str) -> str:
    """Of a function's docstring, read without the import of its module."""
    module, _, name = place.partition(":")
    tree = ast.parse(Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8"))
    (function,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    return (ast.get_docstring(function) or "").partition("\n\n")[0]


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
