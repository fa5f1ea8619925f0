"""docs/results-tables.md, docs/results.md and README.md show what the logs hold."""

import re
from pathlib import Path

import pytest

from gradwire_lab.report.load import find, load
from gradwire_lab.report.run_groups import tasks
from gradwire_lab.report.table import markdown

DOCS = Path(__file__).parents[2] / "docs"


STUDIES = [
    "resnet9",
    "resnet9-choices",
    "ptb",
    "ptb-methods",
    "ptb-shares",
    "resnet20",
    "headline resnet9/dense-0 resnet9/dense-1 resnet9/dense-2",
]


@pytest.mark.parametrize("study", STUDIES)
def test_tables_are_those_of_the_logs(study: str) -> None:
    folders = [DOCS / "results" / name for name in study.split()]
    made = markdown(tasks([load(folder) for folder in find(folders)[0]]), DOCS)
    assert made.strip() in (DOCS / "results-tables.md").read_text(encoding="utf-8"), (
        f"docs/results-tables.md is out of date; `gradwire report {study} --markdown -` in docs/results prints its rows"
    )


Row = dict[str, str]


def rows(page: Path) -> list[Row]:
    """Rows of the tables whose first column is a spec, by the names of their columns."""
    found, columns = [], []
    for line in page.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if not cells or cells[0] == "spec":
            columns = cells
        elif columns and not cells[0].startswith("---"):
            found.append(dict(zip(columns, cells, strict=True)))
    return found


@pytest.mark.parametrize(("page", "least"), [(DOCS / "results.md", 25), (DOCS.parent / "README.md", 4)])
def test_rows_of_the_findings_are_rows_of_the_tables(page: Path, least: int) -> None:
    known = rows(DOCS / "results-tables.md")
    shown = [row for row in rows(page) if row.keys() <= set().union(*known)]
    assert len(shown) >= least
    assert not [row for row in shown if not any(row.items() <= other.items() for other in known)]
