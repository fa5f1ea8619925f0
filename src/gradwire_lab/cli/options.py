"""Options that several commands share, and types of options."""

from enum import StrEnum
from typing import Annotated

import typer


class ChartFormat(StrEnum):
    """The formats of charts."""

    PDF = "pdf"
    SVG = "svg"
    PNG = "png"


AllowCode = Annotated[
    bool, typer.Option("--allow-code", help="Run the Python files that a recipe or a run folder names.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object a line instead of a table.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Devices = Annotated[str, typer.Option(help="Of the workers of this host, in order: 0,0,1,1 or cpu.")]
Data = Annotated[str, typer.Option("--data", help="The folder that holds data sets in their standard layouts.")]
Exchange = Annotated[str | None, typer.Option(help="allgather, two_way, ...; by default the one that sends least.")]
Feedback = Annotated[str | None, typer.Option(help="none, residual, ...; by default what the spec needs.")]
InProcess = Annotated[
    int | None, typer.Option("--in-process", min=1, help="Simulated workers in one process, on one device.")
]
Link = Annotated[str, typer.Option(help="Emulate such links between the workers: 100mbit,20ms.")]
Model = Annotated[str, typer.Option(help="A model of your own: file.py:make.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="A key of the recipe: train.epochs=5.")]
Processes = Annotated[int | None, typer.Option("--workers", min=1, help="Processes on this machine.")]
Ranks = Annotated[int, typer.Option("--workers", min=1, help="How many ranks.")]
RecipeNames = Annotated[
    list[str] | None, typer.Argument(help="Recipes and fragments, merged in order; digits by default.")
]
RecipeSpec = Annotated[str | None, typer.Option("--spec", help="Short for --set sync.spec=SPEC.")]
Seed = Annotated[int | None, typer.Option(help="Of weights, order, augmentation and random bits.")]
Spec = Annotated[str, typer.Argument(help="A codec such as 'topk(0.01) | sign', or a preset such as 'dgc(0.001)'.")]
