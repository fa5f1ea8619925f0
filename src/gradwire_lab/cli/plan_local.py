"""What `gradwire plan` prints of local steps: the start, the rounds, their bytes, and what a worker holds."""

from collections.abc import Callable, Iterator
from itertools import groupby

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from gradwire.engine import Plan, build, default_rules
from gradwire.engine.method import Method, method
from gradwire.local import LocalMethod, local_method
from gradwire_lab.cli.fitted_table import FittedTable
from gradwire_lab.cli.output import make_table
from gradwire_lab.cli.plan_tables import BYTES, costs, lanes_table
from gradwire_lab.cli.round_memory import RoundMemory
from gradwire_lab.report.numbers import in_bytes
from gradwire_lab.train.recipe import Recipe
from gradwire_lab.train.traffic_forecast import stages

Row = tuple[str, ...]


def local_parts(
    recipe: Recipe, shapes: dict[str, tuple[int, ...]], world: int, last: int
) -> Iterator[RenderableType | FittedTable]:
    """The start, the message of a round, and how many of them there are."""
    rounds = local_method(recipe.local.spec, **recipe.local.message)
    count, end = rounds.rounds_within(last)
    yield Text(f"{rounds}: {min(last, rounds.start):,} steps of the start, then {count:,} rounds, each of which sends")
    if last > max(end, rounds.start):
        yield Text(f"the last {last - end} steps are of a round that does not end: they change no outer weights")

    def planned(whole: Method) -> Plan:
        rules = default_rules(whole, **recipe.local.layout)
        return build(shapes, rules, world, int(recipe.sync.bucket_mb * 2**20))

    message = planned(rounds.message)
    yield lanes_table(message, count, "round")
    yield _bytes(rounds, planned, last)
    yield Text(f"memory of a worker: {RoundMemory.of(rounds, message).text(in_bytes)}")


def _bytes(rounds: LocalMethod, planned: Callable[[Method], Plan], last: int) -> Table:
    """Bytes of a step of the start, and of a round after it."""
    caption = "ratios are against float32 in every step, those of a round too"
    table = make_table("bytes of one rank", ("from step", "in one", *BYTES), caption=caption)
    rows = (*_start_rows(rounds, planned), *_round_rows(rounds, planned(rounds.message), last))
    for row, same in groupby((one for one in rows if one[0] < last), key=lambda one: one[1]):
        table.add_row(f"{next(same)[0]:,}", *row)
    return table


def _start_rows(rounds: LocalMethod, planned: Callable[[Method], Plan]) -> Iterator[tuple[int, Row]]:
    """Of each part of the start, the first step and the cells."""
    for step, codec in rounds.phases if rounds.start else ():
        cells = ("0", "-", "0", "-") if codec is None else costs(planned(method(codec)), 0)
        yield step, ("step of the start", *cells)


def _round_rows(rounds: LocalMethod, message: Plan, last: int) -> Iterator[tuple[int, Row]]:
    """Of all rounds that are alike, the first step and the cells. A message that changes does so by rounds."""
    step, number = rounds.start, 0
    for bound in (*(first for first, _ in rounds.later), max(last, step)):
        H = rounds.after(step).H
        count = -(-max(0, bound - step) // H)
        changes = {number, *(stage for stage in stages(message) if number < stage < number + count)}
        for stage in sorted(changes) if count else ():
            yield step + (stage - number) * H, (f"round of H={H}", *costs(message, stage, H))
        step, number = step + count * H, number + count
