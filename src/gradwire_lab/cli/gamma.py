"""``gradwire bench gamma``: how good ``gamma=auto`` is."""

from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from gradwire_lab.bench.gamma import CODECS, PROBLEMS, compare, table
from gradwire_lab.train.record import append_line
from gradwire_lab.train.run_folder import json_lines
from gradwire_lab.train.time_left import TimeLeft


def gamma(
    results: Annotated[
        Path, typer.Option(help="File of results, one JSON object a line; cells in it are not run again.")
    ],
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each cell, which are averaged.")] = 2,
    only: Annotated[str, typer.Option(help="Run only codecs whose name holds this.")] = "",
) -> None:
    """Compare gamma=auto with the best of a grid of gammas on noisy quadratics, and print a table in Markdown."""
    lines = json_lines(results)
    done = {(line["graph"], line["codec"], len(line["seeds"])) for line in lines}
    missing = [
        (problem, codec)
        for codec, problem in product(CODECS, PROBLEMS)
        if only in codec and (problem.graph, codec, seeds) not in done
    ]
    left = TimeLeft(len(missing))
    for problem, codec in missing:
        lines.append(compare(problem, codec, range(seeds)))
        append_line(results, lines[-1])
        left.finish()
        typer.echo(left.after(f"{codec}, {problem.graph}: gamma {lines[-1]['auto']:.3g}"), err=True)
    typer.echo("\n".join(table(lines)))
