"""Markdown tables for docs/results.md: every row names the command and the logs that made it."""

import os
from collections.abc import Sequence
from pathlib import Path

from gradwire_lab.report.run_groups import Group, Task
from gradwire_lab.report.summary import cells, columns


def markdown(tasks: Sequence[Task], base: Path | None = None) -> str:
    """A heading, a table and its sources for each task.

    Args:
        tasks: Each has a table.
        base: The folder that links to the logs start from: the one that the text will lie in.
    """
    return "\n".join(_section(task, base or Path()) for task in tasks)


def _section(task: Task, base: Path) -> str:
    heads = [column.title for column in columns(task)]
    typed = list(dict.fromkeys(run.command for group in task.groups for run in group.runs))
    lines = [
        f"## {task.name}",
        "",
        _row([*heads, "made by", "logs by seed"]),
        _row(["---", *(["---:"] * (len(heads) - 1)), "---", "---"]),
    ]
    for group in task.groups:
        commands = sorted({typed.index(run.command) + 1 for run in group.runs})
        shown = [_text(cell.text) for cell in cells(task, group)]
        lines.append(_row([*shown, ", ".join(f"({number})" for number in commands), _logs(group, base)]))
    lines += ["", *(f"({number}) `{command}`\n" for number, command in enumerate(typed, 1))]
    return "\n".join(lines)


def _logs(group: Group, base: Path) -> str:
    return ", ".join(f"[{run.seed}]({_link(run.folder, base)}/run.jsonl)" for run in group.runs)


def _row(entries: Sequence[str]) -> str:
    return f"| {' | '.join(entries)} |"


def _text(text: str) -> str:
    return text.replace("|", "\\|")


def _link(folder: Path, base: Path) -> str:
    return Path(os.path.relpath(folder.resolve(), base.resolve())).as_posix()
