"""``gradwire graph torus --size 16``: what a graph is worth, and what it looks like."""

import math
from html import escape
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from gradwire.topology import Topology, theory
from gradwire.topology import graph as read
from gradwire_lab.cli.output import refusing

WIDEST = 64  # characters of a picture; larger graphs are drawn in blocks
SHADES = ".-:+#"
SIDE = 480  # of a drawing, in pixels


def graph(
    name: Annotated[str, typer.Argument(help="A graph as in specs: ring, torus, 'erdos_renyi(0.3, seed=1)', ...")],
    size: Annotated[int, typer.Option("--size", "-n", help="Number of ranks.")],
    delta: Annotated[
        float | None, typer.Option(help="A codec's contraction in (0, 1]: print CHOCO's theoretical step for it.")
    ] = None,
    svg: Annotated[Path | None, typer.Option(help="Draw ranks and edges into this SVG, too.")] = None,
) -> None:
    """Print the properties of a gossip graph, and draw it."""
    try:
        topology = read(name).on(size)
        rows = facts(topology, delta)
    except ValueError as wrong:
        raise typer.BadParameter(str(wrong)) from None
    table = Table("", str(topology))
    for label, value in rows:
        table.add_row(label, value)
    Console().print(table)
    typer.echo(f"{picture(topology)}\n{_legend(topology)}")
    if svg is not None:
        with refusing("graph", OSError):
            svg.write_text(drawing(topology), encoding="utf-8")
        typer.echo(str(svg))


def facts(topology: Topology, delta: float | None = None) -> list[tuple[str, str]]:
    """What there is to say of a topology, line by line."""
    halving = theory.rounds_to_halve(topology)
    rows = [
        ("weights", _kind(topology)),
        ("period", f"{topology.period} rounds" if topology.period > 1 else "1: static"),
        ("edges", str(_edges(topology))),
        ("degrees", _span(topology.degrees)),
        ("rho, the spectral gap", f"{topology.rho:.4g}"),
        ("beta, the norm of I - W", f"{topology.beta:.4g}"),
        ("rounds to halve disagreement", str(halving)),
    ]
    if delta is not None:
        rows.append((f"CHOCO's gamma* at delta {delta:g}", f"{theory.consensus_step(topology, delta):.3g}"))
        rows.append(("its factor per round", f"{theory.consensus_factor(topology, delta):.8g}"))
    return rows


def picture(topology: Topology) -> str:
    """The adjacency as characters: row i receives from column j.

    Up to `WIDEST` ranks, each entry is one character: ``#`` an edge (where weights change, the last digit of the round
    in which it sends), ``o`` a rank itself, ``x`` itself where it keeps nothing of its own. Beyond that one character
    stands for a block of entries, darker with more edges.
    """
    if topology.size > WIDEST:
        return _blocks(topology, math.ceil(topology.size / WIDEST))
    cells = [["."] * topology.size for _ in range(topology.size)]
    for step in reversed(range(topology.period)):
        for i in range(topology.size):
            cells[i][i] = "o" if topology.self_weight(i, step) else "x"
            for j in topology.peers(i, step):
                cells[i][j] = "#" if topology.period == 1 else str(step % 10)
    return "\n".join(" ".join(row) if topology.size <= WIDEST // 2 else "".join(row) for row in cells)


def drawing(topology: Topology) -> str:
    """The graph as SVG: ranks on a circle, edges as lines, with an arrow to the receiver where only one end sends."""
    angles = [2 * math.pi * rank / topology.size for rank in range(topology.size)]
    places = [(SIDE / 2 * (1 + 0.86 * math.sin(a)), SIDE / 2 * (1 - 0.86 * math.cos(a))) for a in angles]
    radius = max(2.0, min(14.0, SIDE / topology.size))
    arrows = _arrows(topology)
    lines = [
        _line(places[sender], places[receiver], radius, (sender, receiver) in arrows)
        for receiver, sender in sorted(arrows)
        if (sender, receiver) not in arrows or sender > receiver  # an edge both ways is drawn once
    ]
    dots = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}"/>' for x, y in places]
    names = [f'<text x="{x:.1f}" y="{y:.1f}" dy="0.35em">{rank}</text>' for rank, (x, y) in enumerate(places)]
    shapes = [*lines, *dots, *(names if radius > 8 else [])]
    text = (resources.files("gradwire_lab.cli") / "graph_svg.txt").read_text(encoding="utf-8")
    return text.format(side=SIDE, title=escape(str(topology)), shapes="\n".join(shapes))


def _line(start: tuple[float, float], end: tuple[float, float], radius: float, both: bool) -> str:
    """From the middle of a dot to that of another, or to its edge where it ends in an arrow."""
    share = 1.0 if both else 1 - (radius + 3) / math.dist(start, end)
    x, y = (a + share * (b - a) for a, b in zip(start, end, strict=True))
    arrow = "" if both else ' marker-end="url(#arrow)"'
    return f'<line x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{x:.1f}" y2="{y:.1f}"{arrow}/>'


def _legend(topology: Topology) -> str:
    if topology.size > WIDEST:
        return "rows receive from columns; the darker a block, the more of its ranks do"
    mark = "#" if topology.period == 1 else "digit: in that round"
    return f"rows receive from columns ({mark}); o is the rank itself"


def _blocks(topology: Topology, side: int) -> str:
    count = math.ceil(topology.size / side)
    filled = [[0] * count for _ in range(count)]
    for i, j in _arrows(topology):
        filled[i // side][j // side] += 1
    return "\n".join("".join(SHADES[math.ceil(4 * cell / side**2)] for cell in row) for row in filled)


def _arrows(topology: Topology) -> set[tuple[int, int]]:
    steps, ranks = range(topology.period), range(topology.size)
    return {(i, j) for step in steps for i in ranks for j in topology.peers(i, step)}


def _edges(topology: Topology) -> int:
    arrows = len(_arrows(topology))
    return arrows // 2 if topology.symmetric else arrows


def _kind(topology: Topology) -> str:
    if topology.symmetric:
        return "symmetric, doubly stochastic"
    return "directed, doubly stochastic" if topology.doubly_stochastic else "directed, column-stochastic: push-sum only"


def _span(degrees: tuple[int, ...]) -> str:
    low, high = min(degrees), max(degrees)
    return str(low) if low == high else f"{low} to {high}, {sum(degrees) / len(degrees):.3g} on average"
