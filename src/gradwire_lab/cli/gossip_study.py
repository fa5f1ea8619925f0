"""``gradwire gossip-study STUDY.toml``: a table of decentralized trainings."""

import os
from pathlib import Path
from typing import Annotated

import typer

from gradwire_lab.cli.options import Data
from gradwire_lab.cli.output import refusing
from gradwire_lab.report.gossip_table import gossip_page
from gradwire_lab.train import gossip_study as work
from gradwire_lab.train.run_modes import device_of, devices_of


def gossip_study(
    study: Annotated[Path, typer.Argument(help="A TOML file: recipes, set, and [[cell]] with name, set, seeds.")],
    results: Annotated[Path, typer.Option(help="Where finished cells are written, one JSON object a line.")],
    data: Data = "",
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="Set a key of all cells that does not identify them: data.options..."),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that train side by side on one device.")] = 1,
    device: Annotated[str, typer.Option(help="The device: cpu, cuda:0, ...; by default the first GPU.")] = "",
    budget_seconds: Annotated[
        float | None, typer.Option(min=0, help="Start no cell that would not end in time; the same command continues.")
    ] = None,
    page: Annotated[Path | None, typer.Option(help="Write a page of Markdown about what is finished.")] = None,
    train: Annotated[bool, typer.Option(help="With --no-train, only write the page.")] = True,
) -> None:
    """Train the cells of a study that are not finished yet, all workers of a cell in one process."""
    extra = [*([f"data.root={data}"] if data else []), *(overrides or [])]
    with refusing("gossip-study", ValueError):
        cells = work.read(study)
        for cell in cells:
            cell.recipe(extra)
        where = str(device_of(0, devices_of(device, 1)))
    if train:
        work.run(cells, results, jobs, where, extra, budget_seconds, typer.echo)
    if page is not None:
        known = {cell.key for cell in cells}
        lines = [line for key, line in work.finished(results).items() if key in known]
        sources = [os.path.relpath(path, page.parent) for path in (study, results)]
        page.write_text(gossip_page(work.load(study), lines, sources), encoding="utf-8")
