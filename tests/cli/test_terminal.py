"""What is shown in a terminal of 80 columns, and how long the rest will take."""

import re

import pytest
import typer
from typer.testing import CliRunner

from gradwire_lab.cli import output
from gradwire_lab.cli.main import BenchGroup, RootGroup, app
from gradwire_lab.train.time_left import TimeLeft

COMMANDS = [*((name,) for name in RootGroup.table), *(("bench", name) for name in BenchGroup.table)]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_cuts_no_option_in_80_columns(command: tuple[str, ...]) -> None:
    group = typer.main.get_command(app)
    for name in command[:-1]:
        group = group.commands[name]
    options = [
        text
        for one in group.get_command(None, command[-1]).params
        for text in one.opts
        if not getattr(one, "hidden", False)
    ]
    shown = CliRunner().invoke(app, [*command, "-h"], env={"COLUMNS": "80"}).stdout
    assert max(map(len, shown.splitlines())) <= 80 and "…" not in shown
    assert not [text for text in options if text.startswith("--") and not re.search(rf"{text}(?![\w-])", shown)]


def test_a_table_that_is_too_wide_is_stacked(capsys: pytest.CaptureFixture[str]) -> None:
    columns = [f"column {i} of many" for i in range(12)]
    table = output.make_table("wide", columns, no_wrap=True)
    table.add_row(*(f"cell {i} in full" for i in range(12)))
    output.show(table, width=80)
    narrow = capsys.readouterr().out
    assert all(column in narrow for column in columns) and all(f"cell {i} in full" in narrow for i in range(12))
    assert max(map(len, narrow.splitlines())) <= 80
    output.show(table, width=400)
    assert len(capsys.readouterr().out.splitlines()) < 10


def test_the_time_left_is_that_of_what_is_not_done() -> None:
    now = iter([0.0, 10.0, 30.0, 30.0])
    left = TimeLeft(5, clock=lambda: next(now))
    assert left.text == ""
    left.finish()
    assert left.text == "about 0:00:40 left"
    left.skip()
    left.finish()
    assert left.text == "about 0:00:30 left"
