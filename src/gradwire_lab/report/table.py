"""Tables: in Markdown, where every row names the command and the logs that made it, and in LaTeX."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from gradwire_lab.report.run_groups import Task
from gradwire_lab.report.summary import RATIOS, TableColumn, cells, columns

_LEGEND = (
    r"% Needs \usepackage{booktabs}. After \pm: the sample standard deviation over seeds. [low, high]: the 95 % "
    "t-interval of the mean difference, seed by seed.\n"
    f"% {RATIOS}"
)

_SELDOM_PRINTED = ("95 % interval", "sent by a rank", "wall time")  # a table with them is wider than most pages
_ONCE = ("ranks", "seeds")  # most often the same for all specs


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


def latex(tasks: Sequence[Task], base: Path | None = None, *, every_column: bool = False) -> str:
    """A table of the package booktabs for each task, with what made it in comments.

    Args:
        tasks: Each has a table.
        base: Not used: comments have no links.
        every_column: Whether to keep columns that are seldom printed, and those that say the same of all specs.
    """
    del base
    return "\n".join(_tabular(task, every_column) for task in tasks)


def _tabular(task: Task, every_column: bool) -> str:
    """Each column is a list of its title and its cells, until rows are written."""
    rows = [[cell.text for cell in cells(task, group)] for group in task.groups]
    table = {column: [column.title, *texts] for column, *texts in zip(columns(task), *rows, strict=True)}
    alike = {column.title: texts[1] for column, texts in table.items() if _is_alike(column, texts[1:])}
    left_out = set() if every_column else {*_SELDOM_PRINTED, *alike}
    shown = {column: texts for column, texts in table.items() if column.title not in left_out}
    written = [[(_figure if column.numeric else _escaped)(text) for text in texts] for column, texts in shown.items()]
    head, *body = (" & ".join(row) + r" \\" for row in zip(*written, strict=True))
    layout = "".join("r" if column.numeric else "l" for column in shown)
    typed = dict.fromkeys(run.command for group in task.groups for run in group.runs)
    lines = [f"% {task.title}", _LEGEND, *(f"% {title}: {text}" for title, text in alike.items())]
    lines += [f"% {line}" for command in typed for line in command.splitlines()]
    lines += [rf"\begin{{tabular}}{{{layout}}}", r"\toprule", head, r"\midrule", *body, r"\bottomrule"]
    return "\n".join((*lines, r"\end{tabular}", ""))


def _is_alike(column: TableColumn, texts: Sequence[str]) -> bool:
    """Whether a line above the table can say what the column says."""
    return column.title in _ONCE and len(set(texts)) == 1


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
