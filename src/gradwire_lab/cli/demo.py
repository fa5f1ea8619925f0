"""``gradwire demo``: a training in real processes, dense and compressed."""

import os
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from gradwire.comm.emulated import VARIABLE, set_emulated_link
from gradwire_lab.cli.fitted_table import FittedTable
from gradwire_lab.cli.options import Exchange, Feedback, Link, Ranks
from gradwire_lab.cli.output import refusing
from gradwire_lab.cli.specs import checked_method
from gradwire_lab.launch import RankError, launch
from gradwire_lab.train.data.digits import TRAIN
from gradwire_lab.train.demo import DemoJob, train_all
from gradwire_lab.train.time_left import TimeLeft

DEFAULT = "topk(0.01) | sign"


def demo(
    specs: Annotated[
        list[str] | None, typer.Argument(help="Specs to compare with dense; by default 'topk(0.01) | sign'.")
    ] = None,
    feedback: Feedback = None,
    exchange: Exchange = None,
    workers: Ranks = 4,
    epochs: Annotated[int, typer.Option(min=1, help="Number of passes over the 1200 images.")] = 18,
    link: Link = "",
    seed: Annotated[int, typer.Option(help="Seed of weights, shuffling and random bits.")] = 0,
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
        console.print(Text(left.after(_line(record, max(len(str(job)) for job in jobs)))))

    with refusing("demo", RankError, code=1):
        finals = launch(train_all, workers, jobs, seed, on_message=lambda _, record: report(record))
    console.print(_comparison(finals[0])(console.width))


def _line(record: dict[str, Any], room: int) -> str:
    """An epoch. With the time that is left, it fits 80 columns for specs of 17 characters."""
    progress = f"epoch {record['epoch']:>2.0f}/{record['epochs']}"
    return f"{record['job']:<{room}} {progress}  loss {record['train_loss']:.4f}  accuracy {record['value']:.2%}"


def _comparison(finals: list[dict[str, Any]]) -> FittedTable:
    columns = ("spec", "accuracy", "sent per rank", "payload ratio", "wire ratio", "seconds")
    caption = "payload ratio: float32 bytes / bytes encoded; wire ratio: bytes of a float32 ring / bytes sent"
    rows = []
    for final in finals:
        ratios = (f"{final[name]:,.1f}" for name in ("payload_ratio", "wire_ratio"))
        size = f"{final['sent'] / 1e6:,.2f} MB"
        rows.append((final["job"], f"{final['value']:.2%}", size, *ratios, f"{final['seconds']:.1f}"))
    return FittedTable("on the test images, after the last epoch", columns, rows, caption=caption)
