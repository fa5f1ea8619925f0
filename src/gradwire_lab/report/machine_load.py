"""Machine load: how busy a machine was during a run, so that nobody compares times that other work has stretched."""

import math
import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from gradwire_lab.report.load import RunRecord


class MachineLoad(NamedTuple):
    """The load average of a machine, as records have it.

    Attributes:
        load: Processes that ran or waited for a core, averaged over the last minute.
        cores: That the run could use.
        threads: That the run's own processes on this machine compute with.
    """

    load: float
    cores: int
    threads: int

    @property
    def busy(self) -> bool:
        """Whether the cores do not suffice, and more than this run waits for them."""
        return self.load > self.cores and self.load > self.threads + 1

    def __str__(self) -> str:
        return f"load {self.load:.1f} on {self.cores} core{'s' * (self.cores != 1)}"


def measured(cores: int, threads: int) -> MachineLoad | None:
    """Of this machine, now; None where the system does not count it."""
    return MachineLoad(round(os.getloadavg()[0], 2), cores, threads) if hasattr(os, "getloadavg") else None


def during(run: RunRecord) -> MachineLoad | None:
    """The mean over a run's epochs; None where the run did not note it."""
    noted = [found for record in run.epochs if (found := noted_in(record)) is not None]
    if not noted:
        return None
    return noted[-1]._replace(load=math.fsum(one.load for one in noted) / len(noted))


def noted_in(record: Mapping[str, Any]) -> MachineLoad | None:
    """What a record has of it."""
    if not record.keys() >= set(MachineLoad._fields):
        return None
    return MachineLoad(float(record["load"]), int(record["cores"]), int(record["threads"]))


def sentence(runs: Iterable[RunRecord]) -> str:
    """The caption of a chart of times: the load, and which runs other work has slowed. Empty where none noted it."""
    known = [(run, load) for run in runs if (load := during(run)) is not None]
    if not known:
        return ""
    loads = sorted(load.load for _, load in known)
    span = f"{loads[0]:.1f}" if loads[-1] - loads[0] < 0.1 else f"{loads[0]:.1f} to {loads[-1]:.1f}"
    cores = " or ".join(str(count) for count in sorted({load.cores for _, load in known}))
    text = f" The machine's load was {span} on {cores} cores."
    busy = list(dict.fromkeys(run.spec for run, load in known if load.busy))
    return text + (f" Other work slowed {', '.join(busy)}: do not compare these times." if busy else "")
