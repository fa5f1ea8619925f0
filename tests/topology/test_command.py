"""``gradwire graph``."""

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
