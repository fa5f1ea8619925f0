"""``gradwire bench gamma``: how good ``gamma=auto`` is."""

import json
from pathlib import Path
from typing import Annotated

import typer

from gradwire_lab.bench.gamma import CODECS, PROBLEMS, compare, table


def gamma(
    results: Annotated[Path, typer.Option(help="Where lines go, one JSON object each; what is there is not redone.")],
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each cell, which are averaged.")] = 2,
    only: Annotated[str, typer.Option(help="Only codecs whose name holds this.")] = "",
) -> None:
    """Compare ``gamma=auto`` with the best of a grid of gammas on noisy quadratics, and print a table of Markdown."""
    lines = [json.loads(line) for line in results.read_text().splitlines()] if results.is_file() else []
    done = {(line["graph"], line["codec"], len(line["seeds"])) for line in lines}
    results.parent.mkdir(parents=True, exist_ok=True)
    with results.open("a") as book:
        for codec in CODECS:
            for problem in PROBLEMS:
                if only in codec and (problem.graph, codec, seeds) not in done:
                    lines.append(compare(problem, codec, range(seeds)))
                    book.write(json.dumps(lines[-1]) + "\n")
                    book.flush()
    typer.echo("\n".join(table(lines)))
