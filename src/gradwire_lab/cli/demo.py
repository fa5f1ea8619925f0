"""``gradwire demo``: a training in real processes, dense and compressed."""

import os
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradwire.comm.emulated import VARIABLE, set_emulated_link
from gradwire_lab.cli.options import Exchange, Feedback, Link, Ranks
from gradwire_lab.cli.output import make_table, refusing
from gradwire_lab.cli.specs import checked_method
from gradwire_lab.launch import RankError, launch
from gradwire_lab.train.data.digits import TRAIN
from gradwire_lab.train.demo import DemoJob, train_all
from gradwire_lab.train.time_left import TimeLeft

DEFAULT = "topk(0.01) | sign"


def demo(
    specs: Annotated[
        list[str] | None, typer.Argument(help="One or more, beside dense; by default 'topk(0.01) | sign'.")
    ] = None,
    feedback: Feedback = None,
    exchange: Exchange = None,
    workers: Ranks = 4,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the 1200 images.")] = 18,
    link: Link = "",
    seed: Annotated[int, typer.Option(help="Of weights, shuffling and random bits.")] = 0,
) -> None:
    """Train on handwritten digits in real processes, dense and compressed, and compare."""
    named = specs or [DEFAULT]
    for spec in named:
        checked_method("demo", spec, feedback, exchange)
    with refusing("demo", ValueError):
        set_emulated_link(link or os.environ.get(VARIABLE, ""))

    jobs = [DemoJob("dense", epochs=epochs), *(DemoJob(spec, feedback, exchange, epochs) for spec in named)]
    console = Console()
    console.print(f"{workers} gloo processes, {epochs} epochs of {TRAIN} digits, seed {seed}")
    left = TimeLeft(len(jobs) * epochs)

    def report(record: dict[str, Any]) -> None:
        left.finish()
        console.print(Text(left.after(_line(record))))

    with refusing("demo", RankError, code=1):
        finals = launch(train_all, workers, jobs, seed, on_message=lambda _, record: report(record))
    console.print(_comparison(finals[0]))


def _line(record: dict[str, Any]) -> str:
    progress = f"epoch {record['epoch']:>2.0f}/{record['epochs']}"
    numbers = f"loss {record['train_loss']:.4f}  accuracy {record['value']:.2%}  {record['seconds']:.1f} s"
    return f"{record['job']:<24} {progress}  {numbers}"


def _comparison(finals: list[dict[str, Any]]) -> Table:
    columns = ("spec", "accuracy", "sent per rank", "payload ratio", "wire ratio", "seconds")
    caption = "payload ratio: float32 bytes / bytes encoded; wire ratio: bytes of a float32 ring / bytes sent"
    table = make_table("on the test images, after the last epoch", columns, ("spec",), caption)
    for final in finals:
        ratios = (f"{final[name]:,.1f}" for name in ("payload_ratio", "wire_ratio"))
        size = f"{final['sent'] / 1e6:,.2f} MB"
        table.add_row(final["job"], f"{final['value']:.2%}", size, *ratios, f"{final['seconds']:.1f}")
    return table
