"""Contest: start the ranks of a field, hear their turns, and make rows of them, whatever happens to whom."""

import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from gradwire.comm.emulated import VARIABLE
from gradwire.comm.rates import LinkSpec
from gradwire_lab.bench.network.cells import Field, Pace, Row, described
from gradwire_lab.bench.network.contestants import SILENT
from gradwire_lab.bench.network.turns import MARK, summarize
from gradwire_lab.network.hosts import FIRST_PORT, Hosts
from gradwire_lab.network.launch import DEFAULTS, Crew, Ended, Sink, place

Run = Callable[[Sequence[str], Sink], Ended]
Tell = Callable[[str], object]


class Unbegun(RuntimeError):
    """No rank came as far as the first turn; the sentence says what they said instead."""


class Log:
    """What the ranks of one run have said."""

    def __init__(self, tell: Tell) -> None:
        self.turns: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        self.given_up: dict[str, str] = {}
        self.now = ""
        self.words: list[str] = []
        self._tell = tell

    def hear(self, rank: int, line: str) -> None:
        if not line.startswith(MARK):
            self.words = [*self.words[-20:], line]
            return
        news = json.loads(line.removeprefix(MARK))
        method = news["method"]
        if "begun" in news:
            self.now = method
            self._tell(f"round {news['round'] + 1}: {method}")
        elif "refused" in news:
            self.given_up.setdefault(method, f"refused: {news['refused']}")
        elif "timeout" in news:
            self.given_up.setdefault(method, f"timeout: no end of a turn within {news['timeout']:g} s")
        else:
            self.turns[method].append({**news, "rank": rank})


def hold(field: Field, methods: Sequence[str], pace: Pace, tell: Tell = lambda line: None) -> Iterator[Row]:
    """Measure methods side by side; a row for each, also for one that refused, died or took too long.

    Raises:
        Unbegun: The ranks ended before any method had its turn, so that no method is to blame.
    """
    waiting = list(methods)
    while waiting:
        order = [SILENT, *(method for method in waiting if method != SILENT)]
        with _ranks(field) as run:
            log = Log(tell)
            before = os.getloadavg()[0]
            ended = run(_command(field, order, pace), log.hear)
            load = {"load_before": before, "load_after": os.getloadavg()[0]}
        if ended.code and not log.given_up:
            last = f"{ended.why} {' '.join(log.words[-3:])}"[:500]
            if not log.now:
                raise Unbegun(f"the ranks ended before the first turn: {last}")
            log.given_up[log.now] = f"died: {last}"
        whole = pace.rounds * field.world
        silent = log.turns.get(SILENT)
        for method in list(waiting):
            row = {**described(field, method, pace), **load}
            if method in log.given_up:
                yield {**row, "failed": log.given_up[method]}
            elif len(log.turns[method]) == whole and silent:
                yield {**row, **summarize(log.turns[method]), "silent_ms": summarize(silent)["step_ms"]}
            else:
                continue
            waiting.remove(method)
        if ended.code and SILENT in log.given_up:
            return  # nothing can be compared with it


def _command(field: Field, methods: Sequence[str], pace: Pace) -> list[str]:
    job = {"model": field.model, "methods": list(methods), "pace": asdict(pace)}
    return [sys.executable, "-m", "gradwire_lab.bench.network.turns", json.dumps(job)]


@contextmanager
def _ranks(field: Field) -> Iterator[Run]:
    """How to run a command in all ranks of a field."""
    link = LinkSpec.parse(field.link)
    if field.where == "hosts":
        with Hosts(field.world, link) as hosts:
            yield lambda argv, sink: hosts.run(argv, sink=sink)
    else:
        yield lambda argv, sink: _beside(argv, field.world, link, sink)


def _beside(argv: Sequence[str], world: int, link: LinkSpec, sink: Sink) -> Ended:
    """Ranks on this host, on a link that pretends."""
    variables = {**DEFAULTS, **os.environ, VARIABLE: str(link)}
    if link == LinkSpec():
        del variables[VARIABLE]
    crew = Crew(sink)
    port = FIRST_PORT + os.getpid() % 10_000
    try:
        for rank in range(world):
            own = variables | place(rank, world, 1, ("127.0.0.1", port), "lo")
            crew.start(f"rank {rank}", list(argv), own, None)
        return crew.wait(None, 3.0, lambda: "")
    finally:
        crew.close()
