"""A campaign: faults of one family, drawn from a seed, counted by kind, with all failures kept.

A fault must end in a right result or in an error that names something. Everything else is a failure of one of four
kinds: a wrong result, a hang, an orphan, or a traceback.
"""

import json
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FAILURES = ("wrong result", "hang", "orphan", "traceback")


@dataclass
class Campaign:
    """The account of one campaign while it runs.

    Attributes:
        name: Of the campaign.
        seed: Of all that is drawn.
        seconds: How long it may go on.
        count: After how many faults it ends, whatever the time; None: when the time is over.
        kinds: How many faults of each kind were made.
        failures: What went wrong: the kind of failure, and what led to it.
        facts: What else to publish.
        folder: Where the account is written while the campaign runs, so that an interrupted one leaves its counts.
    """

    name: str
    seed: int
    seconds: float
    count: int | None = None
    kinds: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[str, str]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    folder: Path | None = None

    def __post_init__(self) -> None:
        self.random = random.Random(f"{self.name} {self.seed}")
        self.began = self._written = time.monotonic()

    @property
    def total(self) -> int:
        return sum(self.kinds.values())

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def going(self) -> bool:
        """Whether another fault is to be made. A count wins over the time, so that a seed makes the same faults."""
        if self.folder is not None and time.monotonic() > self._written + 20.0:
            self._written = time.monotonic()
            self.write(self.folder)
        return self.total < self.count if self.count is not None else self.elapsed < self.seconds

    def made(self, kind: str, faults: int = 1) -> None:
        self.kinds[kind] += faults

    def fail(self, failure: str, what: str) -> None:
        assert failure in FAILURES
        self.failures.append((failure, what))

    def expect(self, right: bool, failure: str, what: str) -> None:
        if not right:
            self.fail(failure, what)

    def summary(self) -> dict[str, Any]:
        failures = {kind: sum(one == kind for one, _ in self.failures) for kind in FAILURES}
        return {
            "campaign": self.name,
            "seed": self.seed,
            "seconds": round(self.elapsed, 1),
            "faults": self.total,
            "kinds": dict(sorted(self.kinds.items())),
            "failures": failures,
            "examples": self.failures[:20],
            **self.facts,
        }

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name.replace(' ', '-')}-{self.seed}.json"
        path.write_text(json.dumps(self.summary(), indent=2) + "\n")
        return path


Run = Callable[[Campaign], None]
