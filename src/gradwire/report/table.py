"""Markdown tables for docs/results.md: every row names the command and the logs that made it."""

import os
from collections.abc import Sequence
from pathlib import Path

from gradwire.report.groups import Group, Task
from gradwire.report.numbers import in_seconds
from gradwire.report.summary import cells, columns


def markdown(tasks: Sequence[Task], base: Path | None = None) -> str:
    """A heading, a table and its sources for each task.

    Args:
        tasks: What to tell of.
        base: The folder that links to the logs start from: the one that the text will lie in.
    """
    return "\n".join(_section(task, base or Path()) for task in tasks)


def _section(task: Task, base: Path) -> str:
    heads = [column.title for column in columns(task)]
    lines = [
        f"## {task.name}",
        "",
        _row([*heads, "made by"]),
        _row(["---", *(["---:"] * (len(heads) - 1)), "---"]),
    ]
    for number, group in enumerate(task.groups, 1):
        lines.append(_row([*(_text(cell.text) for cell in cells(task, group)), f"({number})"]))
    lines += ["", *(_source(number, group, base) for number, group in enumerate(task.groups, 1)), ""]
    return "\n".join(lines)


def _source(number: int, group: Group, base: Path) -> str:
    """The command and the logs behind a row."""
    logs = ", ".join(f"[{run.seed}]({_link(run.folder, base)}/run.jsonl)" for run in group.runs)
    said = dict.fromkeys(run.command for run in group.runs)
    took = sum(run.number("seconds") or 0 for run in group.runs)
    return f"({number}) `{'`, `'.join(said)}`; {in_seconds(took)} in all; logs by seed: {logs}\n"


def _row(entries: Sequence[str]) -> str:
    return f"| {' | '.join(entries)} |"


def _text(text: str) -> str:
    return text.replace("|", "\\|")


def _link(folder: Path, base: Path) -> str:
    return Path(os.path.relpath(folder.resolve(), base.resolve())).as_posix()
