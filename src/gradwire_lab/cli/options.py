"""Options that several commands share, and types of options."""

from enum import StrEnum
from pathlib import Path
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
Device = Annotated[str, typer.Option(help="Where to run: cpu or cuda.")]
Devices = Annotated[str, typer.Option(help="Devices of this host's workers, in order: 0,0,1,1 or cpu.")]
Data = Annotated[str, typer.Option("--data", help="The folder that holds data sets in their standard layouts.")]
Exchange = Annotated[
    str | None, typer.Option(help="The exchange: allgather, two_way, ...; by default the one that sends least.")
]
Feedback = Annotated[
    str | None, typer.Option(help="The feedback: none, residual, ...; by default what the spec needs.")
]
InProcess = Annotated[
    int | None, typer.Option("--in-process", min=1, help="Number of workers that one process simulates, on one device.")
]
Link = Annotated[str, typer.Option(help="Emulate this link between workers: 100mbit,20ms.")]
Model = Annotated[str, typer.Option(help="Your own function that makes the model: file.py:make.")]
NewFolder = Annotated[Path, typer.Option("--folder", help="The folder for the file.")]
NewName = Annotated[str, typer.Argument(help="The name in specs: letters, digits and underscores.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="Set a key of the recipe: train.epochs=5. May be repeated.")
]
Processes = Annotated[int | None, typer.Option("--workers", min=1, help="Number of worker processes on this machine.")]
Ranks = Annotated[int, typer.Option("--workers", min=1, help="Number of ranks.")]
RecipeNames = Annotated[
    list[str] | None, typer.Argument(help="Recipes and fragments, merged in order; digits by default.")
]
RecipeSpec = Annotated[str | None, typer.Option("--spec", help="Short for --set sync.spec=SPEC.")]
Seed = Annotated[int | None, typer.Option(help="Seed of weights, order, augmentation and random bits.")]
Spec = Annotated[str, typer.Argument(help="A codec such as 'topk(0.01) | sign', or a preset such as 'dgc(0.001)'.")]
