"""docs/results.md shows what the logs beside it say."""

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
    made = markdown(tasks([load(folder) for folder in find(folders)]), DOCS)
    assert made.strip() in (DOCS / "results.md").read_text(encoding="utf-8"), (
        f"docs/results.md is out of date; put in it what `gradwire report {study} --markdown -` prints in docs/results"
    )


def test_the_table_of_the_readme_is_a_part_of_it() -> None:
    made = markdown(tasks([load(folder) for folder in find([DOCS / "results" / "resnet9"])]), DOCS)
    rows = [re.split(r"(?<!\\) \| ", line) for line in made.splitlines() if "run.jsonl" in line]
    shown = [f"{row[0]} | {row[3]} | {row[5]} | {row[6]} | {row[7]} |" for row in rows]
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    assert "\n".join(shown) in readme, "the table of README.md is out of date; take it from docs/results.md"
