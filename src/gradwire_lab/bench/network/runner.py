"""Runner: starts the ranks of a scenario, reads what they print, and makes a row for each method."""

import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from gradwire.comm.emulated import VARIABLE
from gradwire.comm.rates import LinkSpec
from gradwire_lab.bench.network.grid import Budget, Row, Scenario, described
from gradwire_lab.bench.network.methods import NO_COMM
from gradwire_lab.bench.network.rank_main import MARK, summarize
from gradwire_lab.network.hosts import Hosts
from gradwire_lab.network.launch import Ended, Sink, run_local

Print = Callable[[str], object]
_RANK = (sys.executable, "-m", "gradwire_lab.bench.network.rank_main")


class StartupError(RuntimeError):
    """No rank came as far as the first turn; the message ends with what they printed."""


class Log:
    """What the ranks of one run have printed."""

    def __init__(self, report: Print) -> None:
        self.turns: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        self.given_up: dict[str, str] = {}
        self.now = ""
        self.others: list[str] = []
        self._report = report

    def add(self, rank: int, line: str) -> None:
        if not line.startswith(MARK):
            self.others = [*self.others[-20:], line]
            return
        event = json.loads(line.removeprefix(MARK))
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
        job = {"model": scenario.model, "methods": order, "budget": asdict(budget)}
        log, before = Log(report), os.getloadavg()[0]
        ended = _run(scenario, [*_RANK, json.dumps(job)], log.add)
        load = {"load_before": before, "load_after": os.getloadavg()[0]}
        if ended.code and not log.given_up:
            last = f"{ended.why} {' '.join(log.others[-3:])}"[:500]
            if not log.now:
                raise StartupError(f"the ranks ended before the first turn: {last}")
            log.given_up[log.now] = f"died: {last}"
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
        if ended.code and NO_COMM in log.given_up:
            return  # nothing can be compared with it


def _run(scenario: Scenario, argv: Sequence[str], sink: Sink) -> Ended:
    """Run a command in all ranks of a scenario."""
    link = LinkSpec.parse(scenario.link)
    if scenario.where == "hosts":
        with Hosts(scenario.world, link) as hosts:
            return hosts.run(argv, sink=sink)
    return run_local(argv, scenario.world, sink, {VARIABLE: "" if link == LinkSpec() else str(link)})
