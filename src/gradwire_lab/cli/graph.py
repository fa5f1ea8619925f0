"""``gradwire graph torus --workers 16``: what a graph is worth, and what it looks like."""

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
ROUND = 206.4  # from the middle of a drawing to its ranks


def graph(
    name: Annotated[str, typer.Argument(help="A graph as in specs: ring, torus, 'erdos_renyi(0.3, seed=1)', ...")],
    size: Annotated[int, typer.Option("--workers", "--size", "-n", help="Number of ranks.")],
    delta: Annotated[
        float | None, typer.Option(help="A codec's contraction in (0, 1]: print CHOCO's theoretical step for it.")
    ] = None,
    svg: Annotated[Path | None, typer.Option(help="Also draw ranks and edges into this SVG.")] = None,
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
    """The graph as SVG: ranks on a circle, edges as lines, with an arrow to the receiver where only one end sends.

    The hub of a star is in the middle. Up to 40 ranks, dots are so small that no edge passes behind a third one.
    Numbers that do not fit into a dot stand outside the circle.
    """
    arrows = _arrows(topology)
    hub = _hub(topology, arrows)
    around = [rank for rank in range(topology.size) if rank != hub]
    turns = {rank: place / len(around) for place, rank in enumerate(around)}
    places = [_place(turns.get(rank), ROUND) for rank in range(topology.size)]
    gap = ROUND * (1 - math.cos(2 * math.pi / topology.size)) if hub is None and topology.size > 2 else SIDE
    radius = max(2.0, min(14.0, SIDE / topology.size, 0.8 * gap))
    lines = [
        _line(places[sender], places[receiver], radius, (sender, receiver) in arrows)
        for receiver, sender in sorted(arrows)
        if (sender, receiver) not in arrows or sender > receiver  # an edge both ways is drawn once
    ]
    dots = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}"/>' for x, y in places]
    inside = radius > 7
    spots = places if inside else [_place(turns.get(rank), ROUND + radius + 11) for rank in range(topology.size)]
    kind = "" if inside else ' class="outside"'
    names = [f'<text{kind} x="{x:.1f}" y="{y:.1f}" dy="0.35em">{rank}</text>' for rank, (x, y) in enumerate(spots)]
    shapes = [*lines, *dots, *(names if topology.size <= WIDEST else [])]
    text = (resources.files("gradwire_lab.cli") / "graph_svg.txt").read_text(encoding="utf-8")
    return text.format(side=SIDE, title=escape(str(topology)), shapes="\n".join(shapes))


def _hub(topology: Topology, arrows: set[tuple[int, int]]) -> int | None:
    """The rank that is an end of every edge, where there is one and only one; a rank without any is one, too."""
    ends = [rank for rank in range(topology.size) if all(rank in arrow for arrow in arrows)]
    return ends[0] if len(ends) == 1 else None


def _place(turn: float | None, distance: float) -> tuple[float, float]:
    """A share of a turn from the top, at a distance from the middle; without one, the middle itself."""
    far, angle = (0.0, 0.0) if turn is None else (distance, 2 * math.pi * turn)
    return SIDE / 2 + far * math.sin(angle), SIDE / 2 - far * math.cos(angle)


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
    ranks, steps = range(topology.size), range(topology.period)
    bare = any(not topology.self_weight(rank, step) for rank in ranks for step in steps)
    return f"rows receive from columns ({mark}); o is the rank itself{', x where it keeps nothing' if bare else ''}"


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
