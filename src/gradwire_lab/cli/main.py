"""The `gradwire` command: what there is, what a spec stands for, and a training that shows it."""

import os
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradwire.codecs import Codec
from gradwire.comm.emulated import VARIABLE, set_emulated_link
from gradwire.engine import Method, Rule, build, method
from gradwire.version import VERSION
from gradwire_lab.cli import bench, hosts
from gradwire_lab.cli.advise import advise
from gradwire_lab.cli.compare import compare
from gradwire_lab.cli.docstring_cards import HEADINGS, Card, alone, cards, size_of, traits_of
from gradwire_lab.cli.forecast import forecast
from gradwire_lab.cli.gamma import gamma
from gradwire_lab.cli.gossip_study import gossip_study
from gradwire_lab.cli.graph import graph
from gradwire_lab.cli.options import Link
from gradwire_lab.cli.output import make_table, refusing
from gradwire_lab.cli.pages import codecs_page
from gradwire_lab.cli.report import report
from gradwire_lab.cli.simulate import simulate
from gradwire_lab.cli.train import evaluate, plan, recipes, train
from gradwire_lab.launch import RankError, launch
from gradwire_lab.train.data.digits import TRAIN
from gradwire_lab.train.demo import DemoJob, train_all
from gradwire_lab.train.traffic_forecast import forecast as traffic

DEFAULT = "topk(0.01) | sign"

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

for command in (train, evaluate, plan, recipes, compare, report, graph, gossip_study, advise, simulate):
    app.command()(command)
bench.app.command()(forecast)
bench.app.command()(gamma)
app.add_typer(bench.app, name="bench")
app.add_typer(hosts.app, name="hosts")

Spec = Annotated[str, typer.Argument(help="A codec such as 'topk(0.01) | sign', or a preset such as 'dgc(0.001)'.")]
Feedback = Annotated[str | None, typer.Option(help="none, residual, ...; by default what the spec needs.")]
Exchange = Annotated[str | None, typer.Option(help="allgather, two_way, ...; by default the one that sends least.")]
Workers = Annotated[int, typer.Option(min=1, help="How many ranks.")]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gradwire {VERSION}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Gradient compression for distributed training, down to the packed bytes."""


@app.command()
def codecs(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the reference page, docs/codecs.md.")] = False,
) -> None:
    """List every name that may stand in a spec."""
    if markdown:
        typer.echo(codecs_page(), nl=False)
        return
    console = Console()
    for kind, heading in HEADINGS.items():
        console.print(_names(heading, cards(kind)))
    for spec, _ in alone():
        console.print(Text(f"{spec} = {method(spec)}"))
    console.print(
        "bits: for each of a million parameters; <= is an upper bound. Full cards: gradwire codecs --markdown"
    )


@app.command()
def show(spec: Spec, feedback: Feedback = None, exchange: Exchange = None, workers: Workers = 4) -> None:
    """Say what a spec stands for, and what it costs."""
    whole = _method("show", spec, feedback, exchange)
    console = Console()
    console.print(Text(f"{spec} = {whole}", style="bold"))
    console.print(_facts(whole, workers))


@app.command()
def demo(
    specs: Annotated[
        list[str] | None, typer.Argument(help=f"One or more, beside dense; by default {DEFAULT!r}.")
    ] = None,
    feedback: Feedback = None,
    exchange: Exchange = None,
    workers: Workers = 4,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the 1200 images.")] = 18,
    link: Link = "",
    seed: Annotated[int, typer.Option(help="Of weights, shuffling and random bits.")] = 0,
) -> None:
    """Train on handwritten digits in real processes, dense and compressed, and compare."""
    named = specs or [DEFAULT]
    for spec in named:
        _method("demo", spec, feedback, exchange)
    with refusing("demo", ValueError):
        set_emulated_link(link or os.environ.get(VARIABLE, ""))

    jobs = [DemoJob("dense", epochs=epochs), *(DemoJob(spec, feedback, exchange, epochs) for spec in named)]
    console = Console()
    console.print(f"{workers} gloo processes, {epochs} epochs of {TRAIN} digits, seed {seed}")
    with refusing("demo", RankError, code=1):
        finals = launch(train_all, workers, jobs, seed, on_message=lambda _, record: console.print(_line(record)))
    console.print(_comparison(finals[0]))


def _method(command: str, spec: str, feedback: str | None, exchange: str | None) -> Method:
    """The method, or a plain sentence and exit code 2."""
    with refusing(command, ValueError, TypeError):
        if spec == "auto":
            raise ValueError("auto measures the link and chooses while it trains; `gradwire advise` says what it would")
        return method(spec, feedback, exchange)


# -- codecs ------------------------------------------------------------------------------------------------------------


def _names(heading: str, found: list[Card]) -> Table:
    table = Table(title=heading, title_justify="left", expand=True)
    table.add_column("name and specs", ratio=2, overflow="fold")
    table.add_column("what it does, by which formula, from which paper", ratio=3, overflow="fold")
    sized, promising = any(size_of(card) for card in found), any(card.parts for card in found)
    if sized:
        table.add_column("bits", justify="right", width=8, overflow="fold")
    if promising:
        table.add_column("promises", width=12, overflow="fold")
    for card in found:
        specs = Text.assemble((card.name, "bold"), *(f"\n{spec}" for spec in card.examples if spec != card.name))
        story = Text("\n").join(Text(line) for line in _story(card))
        bits, promises = (size_of(card),) if sized else (), (traits_of(card),) if promising else ()
        table.add_row(specs, story, *bits, *promises)
        table.add_section()
    return table


def _story(card: Card) -> list[str]:
    if card.kind == "preset":
        return [card.title, *(f"{spec} = {method(spec)}" for spec in card.examples)]
    return [card.title, *card.parts.get("Formula", []), card.line("Paper")]


# -- show --------------------------------------------------------------------------------------------------------------


def _facts(whole: Method, workers: int) -> Table:
    """What travels for one matrix of a million parameters, at each stage of the training."""
    (lane,) = build({"weight": (1000, 1000)}, (Rule(whole),), workers).lanes
    floats = sum(sum(slot.lengths) for slot in lane.slots(workers).values()) / lane.units.total
    table = Table.grid(padding=(0, 2))
    table.add_row("feedback", f"{whole.feedback}; all memory together is {4 * floats:.3g} bytes per parameter")
    for step, codec, exchange in lane.table:
        if len(lane.table) > 1:
            table.add_row("")
            table.add_row("from step", str(step))
        if not exchange.compresses_in_protocol:
            table.add_row("codec", _spelled_out(codec))
            table.add_row("promises", str(codec.traits))
        table.add_row("exchange", str(exchange))
        payload, sent, dense, varies = traffic(lane, workers, step)
        ring = 2 * (workers - 1) / workers * dense
        ranks = f"by each of {workers} ranks in a step"
        table.add_row("payload", _cost(payload, dense, varies, "for a million parameters", "smaller than float32"))
        table.add_row("sent", _cost(sent, ring, varies, ranks, "less than a float32 ring all-reduce"))
    return table


def _cost(cost: float, dense: float, varies: bool, per: str, than: str) -> str:
    size = f"{'at most ' if varies else ''}{cost:,.0f} bytes {per}"
    return f"{size}, {'at least ' if varies else ''}{dense / cost:,.1f}x {than}" if cost else size


def _spelled_out(codec: Codec) -> str:
    """All slots, defaults included."""
    slots = (codec.transform, codec.selector, codec.quantizer, codec.indices)
    return " | ".join(str(stage) for stage in slots if stage is not None)


# -- train -------------------------------------------------------------------------------------------------------------


def _line(record: dict[str, Any]) -> Text:
    progress = f"epoch {record['epoch']:>2.0f}/{record['epochs']}"
    numbers = f"loss {record['train_loss']:.4f}  accuracy {record['value']:.2%}  {record['seconds']:.1f} s"
    return Text(f"{record['job']:<24} {progress}  {numbers}")


def _comparison(finals: list[dict[str, Any]]) -> Table:
    columns = ("spec", "accuracy", "sent per rank", "payload ratio", "wire ratio", "seconds")
    caption = "payload ratio: float32 bytes / bytes encoded; wire ratio: bytes of a float32 ring / bytes sent"
    table = make_table("on the test images, after the last epoch", columns, ("spec",), caption)
    for final in finals:
        ratios = (f"{final[name]:,.1f}" for name in ("payload_ratio", "wire_ratio"))
        size = f"{final['sent'] / 1e6:,.2f} MB"
        table.add_row(final["job"], f"{final['value']:.2%}", size, *ratios, f"{final['seconds']:.1f}")
    return table


if __name__ == "__main__":
    app()
