"""Tables of `gradwire plan`: what the lanes of a plan are, and how many bytes they send."""

from itertools import groupby

from rich.table import Table

from gradwire.engine import Plan
from gradwire_lab.cli.fitted_table import FittedTable
from gradwire_lab.cli.output import make_table
from gradwire_lab.train.traffic_forecast import forecast, stages, total

BYTES = ("payload", "ratio", "sent", "ratio to a float32 ring")


def lanes_table(made: Plan, last: int, unit: str = "step") -> FittedTable:
    """Lanes as they are in the end.

    Args:
        made: Whose lanes.
        last: The last step, or round.
        unit: Which of the two it is.
    """
    settled = max(step for step in stages(made) if step <= last)
    title = f"lanes from {unit} {settled:,} on" if settled else "lanes"
    heads = ("rule", "bucket", "tensors", "units", "parameters", "codec", "feedback", "exchange", "bytes")
    rows = []
    for number, bucket in enumerate(made.buckets):
        for lane in bucket:
            codec, exchange = lane.at(last)
            codec_text = "low rank" if exchange.compresses_in_protocol else str(codec)
            counts = (str(len(lane.tensors)), str(len(lane.units)), f"{lane.units.total:,}")
            cost = forecast(lane, made.world, last)
            bound = "<= " if cost.bounded else ""
            words = (codec_text, str(lane.feedback), str(exchange))
            rows.append((lane.label, str(number), *counts, *words, f"{bound}{cost.payload:,.0f}"))
    spare = ("units", "tensors", "feedback", "bucket", "parameters")
    return FittedTable(title, heads, rows, spare, left=("codec", "feedback", "exchange"))


def bytes_table(made: Plan, last: int) -> Table:
    """Bytes of a step, from each step on that changes them."""
    table = make_table("bytes of one rank in one step", ("from step", *BYTES))
    steps = [step for step in stages(made) if step <= last]
    for row, same in groupby(steps, key=lambda step: costs(made, step)):
        table.add_row(f"{next(same):,}", *row)
    return table


def costs(made: Plan, step: int, shared_by: int = 1) -> tuple[str, ...]:
    """What is sent once for so many steps, and its ratios to float32 in each of them."""
    cost = total(made, step)
    dense = shared_by * cost.dense
    ring = 2 * (made.world - 1) / made.world * dense
    bound, least = ("<= ", ">= ") if cost.bounded else ("", "")
    wire = f"{least}{ring / cost.sent:,.1f}" if cost.sent else "-"
    payload = f"{least}{dense / cost.payload:,.1f}" if cost.payload else "-"
    return f"{bound}{cost.payload:,.0f}", payload, f"{bound}{cost.sent:,.0f}", wire
