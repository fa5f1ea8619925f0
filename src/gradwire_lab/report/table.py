"""Tables: in Markdown, where every row names the command and the logs that made it, and in LaTeX."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from gradwire_lab.report.run_groups import Task
from gradwire_lab.report.summary import RATIOS, cells, columns

_LEGEND = (
    r"% Needs \usepackage{booktabs}. After \pm: the sample standard deviation over seeds. [low, high]: the 95 % "
    "t-interval of the mean difference, seed by seed.\n"
    f"% {RATIOS}"
)


def markdown(tasks: Sequence[Task], base: Path | None = None) -> str:
    """A heading, a table and its sources for each task.

    Args:
        tasks: Each has a table.
        base: The folder that links to the logs start from: the one that the text will lie in.
    """
    return "\n".join(_section(task, base or Path()) for task in tasks)


def markdown_with_note(tasks: Sequence[Task], base: Path | None = None) -> str:
    """The same, and below what the ratios are of."""
    return f"{markdown(tasks, base)}\n{RATIOS}\n"


def latex(tasks: Sequence[Task], base: Path | None = None) -> str:
    """A table of the package booktabs for each task, with what made it in comments."""
    del base  # comments have no links
    return "\n".join(_tabular(task) for task in tasks)


def _tabular(task: Task) -> str:
    shown = columns(task)
    rows = [[column.title for column in shown], *([cell.text for cell in cells(task, group)] for group in task.groups)]
    written = [
        [_figure(text) if column.numeric else _escaped(text) for column, text in zip(shown, row, strict=True)]
        for row in rows
    ]
    head, *body = (" & ".join(row) + r" \\" for row in written)
    layout = "".join("r" if column.numeric else "l" for column in shown)
    typed = dict.fromkeys(run.command for group in task.groups for run in group.runs)
    lines = [f"% {task.title}", _LEGEND, *(f"% {line}" for command in typed for line in command.splitlines())]
    lines += [rf"\begin{{tabular}}{{{layout}}}", r"\toprule", head, r"\midrule", *body, r"\bottomrule"]
    return "\n".join((*lines, r"\end{tabular}", ""))


def _figure(text: str) -> str:
    """A number, with the signs of mathematics."""
    return re.sub(r"(?<=\d)x\b", r"$\\times$", re.sub(r"(?<![\w.}$])-(?=\d)", "$-$", _escaped(text)))


def _escaped(text: str) -> str:
    """Text as LaTeX prints it."""
    signs = {"\\": r"\textbackslash{}", "|": r"\textbar{}", "+-": r"$\pm$", "<": r"\textless{}", ">": r"\textgreater{}"}
    signs |= {sign: f"\\{sign}" for sign in "&%$#_{}"} | {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return re.sub("|".join(map(re.escape, signs)), lambda found: signs[found[0]], text)


def _section(task: Task, base: Path) -> str:
    heads = [column.title for column in columns(task)]
    typed = list(dict.fromkeys(run.command for group in task.groups for run in group.runs))
    lines = [
        f"## {task.title}",
        "",
        _row([*heads, "made by", "logs by seed"]),
        _row(["---", *(["---:"] * (len(heads) - 1)), "---", "---"]),
    ]
    for group in task.groups:
        commands = sorted({typed.index(run.command) + 1 for run in group.runs})
        shown = [cell.text.replace("|", "\\|") for cell in cells(task, group)]
        logs = ", ".join(f"[{run.seed}]({_link(run.folder, base)}/run.jsonl)" for run in group.runs)
        lines.append(_row([*shown, ", ".join(f"({number})" for number in commands), logs]))
    lines += ["", *(f"({number}) `{command}`\n" for number, command in enumerate(typed, 1))]
    return "\n".join(lines)


def _row(entries: Sequence[str]) -> str:
    return f"| {' | '.join(entries)} |"


def _link(folder: Path, base: Path) -> str:
    return Path(os.path.relpath(folder.resolve(), base.resolve())).as_posix()
