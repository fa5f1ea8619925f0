"""Display: a training as a person watches it: a live line in a terminal, plain lines anywhere else."""

import sys
import time
from datetime import timedelta
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

QUIET_SECONDS = 10.0  # between plain lines of steps

Record = dict[str, Any]


class Display:
    """Hears the records of one training."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(width=None if sys.stdout.isatty() else 160)
        self._start: Record = {}
        self._live: Progress | None = None
        self._bar: TaskID | None = None
        self._last: Record = {}
        self._tested: Record = {}
        self._spoke = time.monotonic()

    def __enter__(self) -> "Display":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, why: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def hear(self, record: Record) -> None:
        known = {"start": self._begin, "step": self._step, "epoch": self._epoch, "final": self._end}
        others = {"decision": self._decision, "anew": self._anew, "back": self._back}
        {**known, **others}[record["event"]](record)

    def _begin(self, record: Record) -> None:
        self._start = self._last = record
        self._say(
            f"{_workers(record)} {record['device']}, {record['parameters']:,} parameters, "
            f"{record['batch']} examples a worker and step, {record['steps_per_epoch']} steps an epoch"
        )
        self._say(record["method"])
        if record["step"] >= record["steps"]:
            self._say(f"this run has ended already, at step {record['step']}: nothing is left to train")
        elif record["step"]:
            self._say(f"going on from step {record['step']} of {record['steps']}")
        if self._live is not None:
            self._live.stop()  # the first worker has come back, and begins again
        if self.console.is_terminal:
            self._live = Progress(
                TextColumn("{task.description}"), BarColumn(10), TimeRemainingColumn(), console=self.console
            )
            self._live.start()
            self._bar = self._live.add_task("", total=record["steps"], completed=record["step"])

    def _step(self, record: Record) -> None:
        speed, self._last = self._speed(record), record
        if self._live is not None and self._bar is not None:
            self._live.update(self._bar, description=self._short(record, speed), completed=record["step"])
        elif time.monotonic() - self._spoke > QUIET_SECONDS:
            known = f"  {_metric(self._tested)}" if self._tested else ""
            self._say(
                f"epoch {record['epoch']:6.2f}  loss {record['loss']:.4f}{known}  {speed:,.0f} examples/s  "
                f"{_bytes(record)}  {self._left(record)} left"
            )

    def _short(self, record: Record, speed: float) -> str:
        """A line that leaves room for the bar and the time, in a terminal of 80 columns too."""
        tested = self._tested
        known = f"  {tested['metric']} {_value(tested, tested['value'])}" if tested else ""
        cost = f"{_size(record['sent'])}, {_times(record['payload_ratio'])}"
        return f"epoch {record['epoch']:.2f}  loss {record['loss']:.4f}{known}  {speed:,.0f} ex/s  {cost}"

    def _decision(self, record: Record) -> None:
        self._say(f"auto, step {record['step']}: {record['spec']}, {record['why']}")

    def _anew(self, record: Record) -> None:
        self._say(f"worker {record['worker']} {record['why']}; it is started anew")

    def _back(self, record: Record) -> None:
        self._say(f"worker {record['worker']} is back, at step {record['step']}")

    def _epoch(self, record: Record) -> None:
        self._last = self._tested = record  # the time of a test is none of training
        self._say(
            f"epoch {record['epoch']:6.2f}  loss {record['train_loss']:.4f}  {_metric(record)}  "
            f"{_bytes(record)}{_apart(record)}  {record['seconds']:.1f} s"
        )

    def _end(self, record: Record) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        if "metric" in record:
            self.console.print(summary(record))

    def _speed(self, record: Record) -> float:
        """Examples a second, of all workers."""
        steps = record["step"] - self._last["step"]
        seconds = record["seconds"] - self._last["seconds"]
        examples: float = steps * self._start["batch"] * self._start["world"]
        return examples / max(1e-9, float(seconds))

    def _left(self, record: Record) -> str:
        """How long the rest will take, if it goes on as in this sitting."""
        steps, seconds = (record[name] - self._start[name] for name in ("step", "seconds"))
        left = round(seconds / max(1, steps) * (self._start["steps"] - record["step"]))
        return str(timedelta(seconds=left))

    def _say(self, line: str) -> None:
        self._spoke = time.monotonic()
        self.console.print(Text(line))


def summary(final: Record) -> Table:
    """The closing table."""
    table = Table.grid(padding=(0, 2))
    table.add_row(
        final["metric"], f"{_value(final, final['value'])} at the end, {_value(final, final['best'])} at the best"
    )
    who = "by each worker" if "hosts" not in final else f"by the first worker, between {final['hosts']} hosts"
    cost = f"{_size(final['sent'])} {who}, {_ratio(final['wire_ratio'])} a float32 ring"
    table.add_row("sent", cost if final["sent"] else "nothing")
    if "hosts" in final:
        table.add_row("inside", f"{_size(final['sent_inside'])} of float32 by the first worker, to its host's")
    size = f"{_size(final['payload'])}, {_ratio(final['payload_ratio'])} float32"
    table.add_row("payload", size if final["payload"] else "nothing")
    names = ("encode_seconds", "wire_seconds", "decode_seconds")
    encode, wire, decode = (final[name] for name in names)
    table.add_row(
        "seconds", f"{final['seconds']:.1f}, of which encode {encode:.1f}, wire {wire:.1f}, decode {decode:.1f}"
    )
    if final["skipped"]:
        table.add_row("skipped", f"{final['skipped']} steps, whose gradients were not finite")
    return table


def _workers(start: Record) -> str:
    if start["world"] == 1:
        return "1 worker on"
    return f"{start['world']} {'virtual workers on' if start['virtual'] else 'workers, the first on'}"


def _metric(record: Record) -> str:
    return f"test {record['metric']} {_value(record, record['value'])}"


def _apart(record: Record) -> str:
    """Of workers that gossip: how good their mean is, and how far they are from it."""
    if "consensus" not in record:
        return ""
    return f"  mean model {_value(record, record['mean_model'])}, {record['consensus']:.2g} away"


def _value(record: Record, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2%}" if record["metric"] == "top1" else f"{value:.2f}"


def _bytes(record: Record) -> str:
    return f"{_size(record['sent'])} sent, payload {_times(record['payload_ratio'])} smaller"


def _size(n: float) -> str:
    return f"{n / 1e6:,.2f} MB" if n >= 1e6 else f"{n / 1e3:,.2f} kB"


def _times(ratio: float) -> str:
    return f"{ratio:,.0f}x" if ratio >= 10 else f"{ratio:.1f}x"  # 1.5 is neither one nor two


def _ratio(ratio: float) -> str:
    return f"{ratio:,.1f}x less than"
