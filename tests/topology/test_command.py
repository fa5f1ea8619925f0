"""``gradwire graph``."""

import math
import re
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import pytest
import typer
from typer.testing import CliRunner

from gradwire.topology import graph as read
from gradwire_lab.cli.graph import drawing, facts, graph, picture

app = typer.Typer()
app.command()(graph)


def test_a_torus_is_printed_and_drawn() -> None:
    done = CliRunner().invoke(app, ["torus", "--size", "16", "--delta", "0.1"])
    assert done.exit_code == 0, done.output
    for words in ("torus on 16 ranks", "rounds to halve", "0.4", "32", "gamma*", "0.000864"):
        assert words in done.output
    assert "o # . # # . . . . . . . # . . ." in done.output


@pytest.mark.parametrize(
    ("spec", "size", "drawn"),
    [
        ("ring", 1, "o"),
        ("path", 3, "o # .\n# o #\n. # o"),
        ("one_peer_exponential", 4, "o . 1 0\n0 o . 1\n1 0 o .\n. 1 0 o"),
        ("matrix([[0.0, 0.5, 0.5], [0.5, 0.5, 0.0], [0.5, 0.0, 0.5]])", 3, "x # #\n# o .\n# . o"),
    ],
)
def test_pictures(spec: str, size: int, drawn: str) -> None:
    assert picture(read(spec).on(size)) == drawn


@pytest.mark.parametrize("size", [40, 65, 200])
def test_pictures_stay_small(size: int) -> None:
    lines = picture(read("ring").on(size)).splitlines()
    assert len(lines) <= 64
    assert {len(line) for line in lines} == {len(lines)}


@pytest.mark.parametrize("flag", ["--size", "-n"])
def test_workers_is_a_name_of_the_number_of_ranks(flag: str) -> None:
    done = CliRunner().invoke(app, ["ring", "--workers", "8"])
    assert done.exit_code == 0, done.output
    assert "ring on 8 ranks" in done.output
    assert done.output == CliRunner().invoke(app, ["ring", flag, "8"]).output


def test_the_legend_has_ranks_that_keep_nothing() -> None:
    spec = "matrix([[0.0, 0.5, 0.5], [0.5, 0.5, 0.0], [0.5, 0.0, 0.5]])"
    assert "x where it keeps nothing" in CliRunner().invoke(app, [spec, "--workers", "3"]).output
    assert "x where" not in CliRunner().invoke(app, ["ring", "--workers", "3"]).output


def test_facts_of_a_lopsided_graph() -> None:
    rows = dict(facts(read("arrows([(0, 1), (0, 2), (1, 2), (2, 0)])").on(3)))
    assert rows["weights"].endswith("push-sum only")
    assert rows["edges"] == "4"
    assert rows["degrees"].startswith("1 to 2")


@pytest.mark.parametrize(
    "arguments",
    [
        ["hypercube", "--size", "12"],
        ["ringg", "--size", "4"],
        ["ring", "--size", "0"],
        ["exponential", "--size", "8", "--delta", "0.5"],
    ],
)
def test_invalid_arguments_are_refused(arguments: list[str]) -> None:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert "Traceback" not in done.output
    assert "Invalid value" in done.output


def test_a_graph_is_drawn_as_svg(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["torus", "--size", "16", "--svg", str(tmp_path / "torus.svg")])
    assert done.exit_code == 0, done.output
    root = ElementTree.parse(tmp_path / "torus.svg").getroot()
    count = {tag: len(root.findall(f"{{http://www.w3.org/2000/svg}}{tag}")) for tag in ("line", "circle", "text")}
    assert count == {"line": 32, "circle": 16, "text": 16}
    one_way = drawing(read("arrows([(0, 1), (0, 2), (1, 2), (2, 0)])").on(3))
    assert one_way.count("<line") == 3 and one_way.count("marker-end") == 2  # 0 and 2 send both ways
    refused = CliRunner().invoke(app, ["ring", "--size", "3", "--svg", str(tmp_path / "none" / "ring.svg")])
    assert refused.exit_code == 2 and "ring.svg" in refused.stderr


@pytest.mark.parametrize("size", [1, 2, 8, 16, 25, 40])
@pytest.mark.parametrize("spec", ["ring", "star", "complete"])
def test_no_edge_passes_behind_the_dot_of_a_third_rank(spec: str, size: int) -> None:
    text = drawing(read(spec).on(size))
    dots = [tuple(map(float, dot)) for dot in re.findall(r'cx="([\d.]+)" cy="([\d.]+)" r="([\d.]+)"', text)]
    assert len(dots) == size
    assert all(math.dist(a[:2], b[:2]) > a[2] + b[2] for a, b in combinations(dots, 2))
    for x1, y1, x2, y2 in re.findall(r'x1="([\d.]+)" y1="([\d.]+)" x2="([\d.]+)" y2="([\d.]+)"', text):
        start, end = (float(x1), float(y1)), (float(x2), float(y2))
        others = [dot for dot in dots if start != dot[:2] != end]
        assert len(others) == size - 2
        assert all(_distance(dot[:2], start, end) > dot[2] for dot in others)


def _distance(place: tuple[float, ...], start: tuple[float, float], end: tuple[float, float]) -> float:
    """From a place to a line between two others."""
    (x, y), (dx, dy) = (place[0] - start[0], place[1] - start[1]), (end[0] - start[0], end[1] - start[1])
    share = min(1.0, max(0.0, (x * dx + y * dy) / (dx * dx + dy * dy)))
    return math.hypot(x - share * dx, y - share * dy)


def test_the_hub_of_a_star_is_in_the_middle() -> None:
    assert 'cx="240.0" cy="240.0"' in drawing(read("star").on(8))
    assert 'cx="240.0" cy="240.0"' not in drawing(read("ring").on(8))
