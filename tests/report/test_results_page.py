"""docs/results.md shows what the logs beside it say."""

from pathlib import Path

import pytest

from gradwire.report.groups import tasks
from gradwire.report.load import find, load
from gradwire.report.table import markdown

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("study", ["resnet9"])
def test_tables_are_those_of_the_logs(study: str) -> None:
    made = markdown(tasks([load(folder) for folder in find([DOCS / "results" / study])]), DOCS)
    assert made.strip() in (DOCS / "results.md").read_text(encoding="utf-8"), (
        f"docs/results.md is out of date; put in it what this prints: gradwire report docs/results/{study} --markdown -"
    )
