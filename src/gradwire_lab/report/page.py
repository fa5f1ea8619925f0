"""One self-contained HTML page: data, charts, libraries and style in a single file that loads nothing.

The same charts are also drawn as PNG, SVG or PDF files, without a browser.
"""

import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import vl_convert
from jinja2 import Environment, StrictUndefined

from gradwire.version import VERSION
from gradwire_lab.report.charts import Figure, figures
from gradwire_lab.report.charts.figure import look
from gradwire_lab.report.progress import ProgressLine
from gradwire_lab.report.run_groups import Group, Task
from gradwire_lab.report.slug import slug
from gradwire_lab.report.summary import RATIOS, TableCell, TableColumn, against, cells, columns, ranks

WIDTH = 560  # of a picture
MARGIN = 84  # of a picture's width, about: the vertical axis, its title and the padding
PADDING, LETTER = 12, 6.6  # around a picture, and of a letter of its caption, in pixels
Kind = Literal["png", "svg", "pdf"]


@dataclass(frozen=True)
class Section:
    """A task, ready to be filled in."""

    id: str
    title: str
    note: str
    columns: Sequence[TableColumn] = ()
    rows: Sequence[Sequence[TableCell]] = ()
    figures: Sequence[Figure] = ()
    recipes: Sequence[dict[str, Any]] = ()

    @property
    def charts(self) -> dict[str, dict[str, Any]]:
        """Its figures as Vega-Lite's JSON, by the keys that the page has for them."""
        return {f"{self.id}-{figure.name}": spec(figure) for figure in self.figures}


def page(tasks: Sequence[Task], title: str = "gradwire report") -> str:
    """The page as text.

    Raises:
        ValueError: There is nothing to show.
    """
    if not tasks:
        raise ValueError("no run has finished an epoch yet, so there is nothing to report")
    return render(title, _subtitle(tasks), [section(task) for task in tasks])


def render(
    title: str,
    subtitle: str,
    sections: Sequence[Section],
    progress: Sequence[ProgressLine] = (),
    reload: int | None = None,
) -> str:
    """Sections with their charts, as one file.

    Args:
        title: Of the page.
        subtitle: A line below it.
        sections: In order.
        progress: Of a training that runs, shown at the top.
        reload: Seconds after which the page brings itself up to date; None for one that stays as it is.
    """
    # The look is filled in by the browser: the style sheet has colors for light and for dark.
    placeholders = look("--ink", "--soft", "--faint", "transparent")
    template = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return template.from_string(_asset("template.html")).render(
        title=title,
        subtitle=subtitle,
        version=VERSION,
        style=_asset("page.css"),
        script=_asset("page.js"),
        bundle=bundle(),
        figures=_embedded({key: chart for section in sections for key, chart in section.charts.items()}),
        look=_embedded(placeholders),
        sections=sections,
        progress=progress,
        reload=reload,
    )


@cache  # it takes eight times as long as the rest of a page
def bundle() -> str:
    """The library that draws charts, as a script."""
    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")


def spec(figure: Figure) -> dict[str, Any]:
    """A chart as Vega-Lite's JSON, without the address of its schema and with the look left open."""
    return {key: value for key, value in figure.chart.to_dict().items() if key not in ("$schema", "config")}


def section(task: Task, without: str = "") -> Section:
    """All that there is of a task, but for the figure of this name."""
    return Section(
        id=slug(task.name),
        title=task.title,
        note=_note(task),
        columns=columns(task),
        rows=[
            [TableCell(cell.text.replace("+-", "\u00b1"), cell.key) for cell in cells(task, group)]
            for group in task.groups
        ],
        figures=[figure for figure in figures(task) if figure.name != without],
        recipes=[_recipe(group) for group in task.groups],
    )


def _note(task: Task) -> str:
    text = (
        f"{task.metric.title.capitalize()} after the last epoch: mean \u00b1 sample standard deviation over seeds, and "
        f"the 95 % t-interval of the mean. {RATIOS}"
    )
    if task.baseline is not None and len(task.groups) > 1:
        text += f" Against {against(task)}: the mean of the differences seed by seed, with its 95 % t-interval."
    if any(group.diverged for group in task.groups):
        text += " Diverged: the loss is not finite, or most steps were skipped, so that the metric means nothing."
    sizes = {int(run.start.get("parameters", 0)) for group in task.groups for run in group.runs} - {0}
    if sizes:
        text += f" The model has {' or '.join(f'{size:,}' for size in sorted(sizes))} parameters."
    return text


def _recipe(group: Group) -> dict[str, Any]:
    first = group.runs[0]
    notes = dict(first.environment)
    notes.pop("command", None)
    return {
        "title": group.label,
        "note": f"{first.name}, {ranks(first)} ranks, seeds {', '.join(str(run.seed) for run in group.runs)}",
        "command": first.command,
        "text": first.recipe_text or "no recipe.toml in the run folder",
        "environment": json.dumps(notes, indent=2) if notes else "",
        "logs": [f"{run.folder}/run.jsonl" for run in group.runs],
    }


def _subtitle(tasks: Sequence[Task]) -> str:
    runs = [run for task in tasks for group in task.groups for run in group.runs]
    under_way = sum(run.final is None for run in runs)
    text = f"{len(runs)} run{'s' * (len(runs) != 1)}"
    return f"{text}, {under_way} of them not finished" if under_way else text


def _embedded(value: object) -> str:
    """JSON that cannot close the script element which holds it."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _asset(name: str) -> str:
    return resources.files("gradwire_lab.report").joinpath(name).read_text()


# -- pictures ----------------------------------------------------------------------------------------------------------


def pictures(tasks: Sequence[Task], folder: Path, kind: Kind, width: int = WIDTH, titled: bool = True) -> list[Path]:
    """Write every figure of every task, and say where.

    Args:
        tasks: Each has its figures.
        folder: Where the files go.
        kind: Their format.
        width: Of the whole file, labels and legend included, in pixels of 1/72 inch.
        titled: Whether a figure has its title and caption in it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for task in tasks:
        for figure in figures(task, width - MARGIN):
            path = folder / f"{_stem(task.name)}-{figure.name}.{kind}"
            path.write_bytes(_drawn(_whole(figure, width, titled), kind))
            written.append(path)
    return written


def _drawn(whole: dict[str, Any], kind: Kind) -> bytes:
    if kind == "png":
        return vl_convert.vegalite_to_png(whole, scale=2)
    return vl_convert.vegalite_to_pdf(whole) if kind == "pdf" else vl_convert.vegalite_to_svg(whole).encode()


def _stem(name: str) -> str:
    """A file's name without dots, because LaTeX may take what follows the first one for the extension."""
    return slug(name.replace(".py:", ":")).replace(".", "-")


def _whole(figure: Figure, width: int, titled: bool) -> dict[str, Any]:
    letters = max(16, int((width - 2 * PADDING) / LETTER))
    # A title's letters are larger than those of the caption below it.
    title = {"text": textwrap.wrap(figure.title, letters * 3 // 4), "subtitle": textwrap.wrap(figure.caption, letters)}
    head = {"title": title} if titled else {}
    size = {"width": width, "padding": PADDING, "autosize": {"type": "fit-x", "contains": "padding"}}
    # The plot is fitted into the width only after the legend has its columns, so these cannot follow the plot.
    fixed = json.loads(json.dumps(spec(figure)).replace(": width) /", f": {width - MARGIN}) /"))
    return {**fixed, **head, **size, "config": look()}
