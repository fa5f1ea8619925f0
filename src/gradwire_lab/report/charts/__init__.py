"""What is drawn: a figure is a title that states what is shown, a caption, and a Vega-Lite chart."""

from gradwire_lab.report.charts.accounts import bytes_by_layer, bytes_by_rule, step_time
from gradwire_lab.report.charts.curves import consensus, loss_curve, metric_curve, metric_over_time
from gradwire_lab.report.charts.figure import Figure
from gradwire_lab.report.charts.tradeoff import metric_over_bytes
from gradwire_lab.report.run_groups import Task

__all__ = ["Figure", "figures"]

DRAW = (
    metric_over_bytes,
    metric_over_time,
    metric_curve,
    loss_curve,
    bytes_by_rule,
    bytes_by_layer,
    step_time,
    consensus,
)


def figures(task: Task) -> list[Figure]:
    """Every figure that the task's records allow."""
    return [figure for draw in DRAW if (figure := draw(task)) is not None]
