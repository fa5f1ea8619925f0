"""Runner: starts the ranks of a scenario, collects what they measure, and makes a row for each method."""

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

from gradwire.comm.rates import LinkSpec
from gradwire_lab.bench.network.grid import Budget, Row, Scenario, described
from gradwire_lab.bench.network.methods import NO_COMM
from gradwire_lab.bench.network.rank_main import run_rank, summarize
from gradwire_lab.launch import RankError, launch
from gradwire_lab.network.hosts import Hosts
from gradwire_lab.train.run_folder import cause

Print = Callable[[str], object]
_SPARE_SECONDS = 60.0  # by which collectives are more patient than turns, whose end says which method takes too long


class StartupError(RuntimeError):
    """No rank came as far as the first turn; the message ends with the cause."""


class Log:
    """What the ranks of one run have measured."""

    def __init__(self, report: Print) -> None:
        self.turns: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        self.given_up: dict[str, str] = {}
        self.now = ""
        self._report = report

    def add(self, rank: int, event: dict[str, Any]) -> None:
        method = event["method"]
        if "begun" in event:
            self.now = method
            self._report(f"round {event['round'] + 1}: {method}")
        elif "refused" in event:
            self.given_up.setdefault(method, f"refused: {event['refused']}")
        elif "timeout" in event:
            self.given_up.setdefault(method, f"timeout: no end of a turn within {event['timeout']:g} s")
        else:
            self.turns[method].append({**event, "rank": rank})


def turns(methods: Sequence[str], budget: Budget) -> int:
    """How many pieces of work `measure` has: the start of the ranks, and the turns, also those without messages."""
    return 1 + budget.rounds * len({NO_COMM, *methods}) if methods else 0


def measure(
    scenario: Scenario, methods: Sequence[str], budget: Budget, report: Print = lambda line: None
) -> Iterator[Row]:
    """Measure methods side by side; a row for each, also for one that refused, died or took too long.

    Raises:
        StartupError: The ranks ended before any method had its turn, so that no method is to blame.
    """
    waiting = list(methods)
    while waiting:
        order = [NO_COMM, *(method for method in waiting if method != NO_COMM)]
        log, before = Log(report), os.getloadavg()[0]
        try:
            _run(scenario, order, budget, log)
        except RankError as error:
            if not (log.now or log.given_up):
                raise StartupError(f"the ranks ended before the first turn: {cause(error)}") from None
            log.given_up = log.given_up or {log.now: f"died: {cause(error)}"}
        load = {"load_before": before, "load_after": os.getloadavg()[0]}
        whole = budget.rounds * scenario.world
        silent = log.turns.get(NO_COMM)
        for method in list(waiting):
            row = {**described(scenario, method, budget), **load}
            if method in log.given_up:
                yield {**row, "failed": log.given_up[method]}
            elif len(log.turns[method]) == whole and silent:
                yield {**row, **summarize(log.turns[method]), "silent_ms": summarize(silent)["step_ms"]}
            else:
                continue
            waiting.remove(method)
        if NO_COMM in log.given_up:
            return  # nothing can be compared with it


def _run(scenario: Scenario, methods: Sequence[str], budget: Budget, log: Log) -> None:
    """Measure in all ranks of a scenario."""
    patience = timedelta(seconds=budget.timeout + _SPARE_SECONDS)
    options: dict[str, Any] = {"on_message": log.add, "threads": 1, "timeout": patience}
    if scenario.where == "hosts":
        with Hosts(scenario.world, LinkSpec.parse(scenario.link)) as hosts:
            hosts.call(run_rank, scenario, methods, budget, **options)
    else:
        launch(run_rank, scenario.world, scenario, methods, budget, **options)
