"""A table of results fits the terminal, and names what it leaves out."""

from itertools import pairwise

import pytest
from rich.console import Console

from gradwire_lab.cli.compare import SPARE
from gradwire_lab.cli.fitted_table import FittedTable

HEADS = ["spec", "ranks", "seeds", "test accuracy (%)", "95 % interval", "against fp32", *SPARE[3:]]
SPECS = ["fp32", "topk(0.01) | sign", "dgc(0.01, clip=1.0, ramp=400)", "hadamard | int4 @ optimizer.lr=0.1"]
ROWS = [
    [
        spec,
        "4",
        "3",
        "93.10 +- 11.17",
        "92.68 to 94.52",
        "-10.07 [-20.45, +10.31]",
        "11.8x",
        "1.47 MB",
        "12.1 min",
        "9x",
    ]
    for spec in SPECS
]


def table_of(rows: list[list[str]]) -> FittedTable:
    return FittedTable("digits, cnn", HEADS, rows, SPARE, caption="[low, high] is an interval.", elsewhere="a file")


def shown(width: int, rows: list[list[str]] = ROWS) -> list[str]:
    console = Console(width=width, record=True, file=None, no_color=True)
    with console.capture() as captured:
        console.print(table_of(rows)(width))
    return captured.get().splitlines()


@pytest.mark.parametrize("width", [60, 80, 100, 120, 160])
def test_a_spec_takes_two_lines_at_most_and_nothing_is_cut(width: int) -> None:
    lines = shown(width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "…" not in text and "[low, high]" in text
    assert text.count("-10.07 [-20.45, +10.31]") == text.count("93.10 +- 11.17") == len(SPECS)
    first = next(i for i, line in enumerate(lines) if "+-" in line)
    last = max(i for i, line in enumerate(lines) if "+-" in line)
    assert last - first < 2 * len(SPECS)


def test_what_is_left_out_is_named() -> None:
    told = " ".join(" ".join(shown(80)).split())
    assert "Not shown in 80 columns: ranks (4), seeds (3), 95 % interval" in told
    assert "Not shown" not in " ".join(shown(160))


def test_columns_go_in_their_order() -> None:
    """The wider the terminal, the more columns; what a narrower one shows, a wider one shows, too."""
    tables = ["\n".join(shown(width)).partition("Not shown")[0] for width in (60, 80, 100, 120, 160)]
    seen = [
        {cell for cell in ("11.8x", "1.47 MB", "12.1 min", "9x", "92.68 to 94.52") if cell in table} for table in tables
    ]
    assert all(narrow <= wide for narrow, wide in pairwise(seen))
    assert len(seen[0]) < len(seen[-1]) == 5


def test_a_very_narrow_terminal_has_one_column_below_another() -> None:
    text = "\n".join(shown(40))
    assert "…" not in text and all(head in text for head in HEADS) and text.count("12.1 min") == len(SPECS)


def test_brackets_in_names_are_no_markup() -> None:
    assert "a[b]" in "\n".join(shown(160, [["a[b]", *ROWS[0][1:]]]))


def test_words_are_not_broken() -> None:
    rows = [["majority_vote", *ROWS[0][1:]], ["sign", *ROWS[0][1:]]]
    for width in (60, 70, 80):
        assert "majority_vote" in "\n".join(shown(width, rows))
