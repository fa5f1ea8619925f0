"""What is drawn: a figure is a title that states what is shown, a caption, and a Vega-Lite chart."""

from gradwire_lab.report.charts.accounts import bytes_by_layer, bytes_by_rule, step_time
from gradwire_lab.report.charts.curves import consensus, loss_curve, metric_curve, metric_over_time
from gradwire_lab.report.charts.figure import Figure
from gradwire_lab.report.charts.tradeoff import PLOT_WIDTH, metric_over_bytes
from gradwire_lab.report.run_groups import Task

__all__ = ["Figure", "figures"]

DRAW = (
    metric_over_time,
    metric_curve,
    loss_curve,
    bytes_by_rule,
    bytes_by_layer,
    step_time,
    consensus,
)


def figures(task: Task, width: int = PLOT_WIDTH) -> list[Figure]:
    """Every figure that the task's records allow; ``width`` is that of plots, in pixels."""
    made = (metric_over_bytes(task, width), *(draw(task) for draw in DRAW))
    return [figure for figure in made if figure is not None]
