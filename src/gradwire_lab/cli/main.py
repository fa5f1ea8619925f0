"""The `gradwire` command: the table of its commands. Nothing here imports torch."""

import importlib.util
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from gradwire_lab.cli.lazy import PLAIN, LazyGroup


class RootGroup(LazyGroup):
    """`gradwire`."""

    table: ClassVar = {
        **{name: f"train:{name}" for name in ("train", "evaluate", "plan", "recipes")},
        **{name: f"{name}:{name}" for name in ("watch", "compare", "report", "graph")},
        "gossip-study": "gossip_study:gossip_study",
        **{name: f"{name}:{name}" for name in ("advise", "simulate", "doctor")},
        "codecs": "specs:codecs",
        "show": "specs:show",
        "demo": "demo:demo",
    }


class BenchGroup(LazyGroup):
    """`gradwire bench`."""

    table: ClassVar = {
        **{name: f"bench:{name}" for name in ("calls", "kernels", "step", "memory")},
        **{name: f"bench_network:{name}" for name in ("network", "forecast")},
        "link": "bench_network:emulation_error",
        "gamma": "gamma:gamma",
    }


class NewGroup(LazyGroup):
    """`gradwire new`."""

    table: ClassVar = {name: f"new:{name}" for name in ("codec", "selector", "transform", "exchange", "feedback")}


class HostsGroup(LazyGroup):
    """`gradwire hosts`."""

    table: ClassVar = {"run": "hosts:run", "sweep": "hosts:sweep_leftovers"}
    settings: ClassVar = {"run": {"ignore_unknown_options": True, "allow_interspersed_args": False}}


_OPTIONS: dict[str, Any] = {"no_args_is_help": True, **PLAIN}
app = typer.Typer(cls=RootGroup, context_settings={"help_option_names": ["-h", "--help"]}, **_OPTIONS)
bench = typer.Typer(
    cls=BenchGroup, add_completion=False, help="Measure kernels, steps, memory and links on this machine.", **_OPTIONS
)
hosts = typer.Typer(
    cls=HostsGroup,
    add_completion=False,
    help="Run commands in network hosts that are made on this machine.",
    **_OPTIONS,
)
new = typer.Typer(cls=NewGroup, add_completion=False, help="Write a file to start from.", **_OPTIONS)
app.add_typer(bench, name="bench")
app.add_typer(new, name="new")
app.add_typer(hosts, name="hosts")


for _group in (bench, hosts, new):
    _group.callback()(lambda: None)  # Typer knows no groups without a function of its own


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gradwire {version()}")
        raise typer.Exit


def version() -> str:
    """The version, without the import of gradwire and torch."""
    package = importlib.util.find_spec("gradwire")
    assert package is not None and package.origin is not None
    facts: dict[str, Any] = {}
    exec(Path(package.origin).with_name("version.py").read_text(encoding="utf-8"), facts)
    return str(facts["VERSION"])


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Gradient compression for distributed training, down to the packed bytes."""


if __name__ == "__main__":
    app()
