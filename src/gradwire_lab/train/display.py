"""Display: what is printed while a training goes on: a live line in a terminal, plain lines anywhere else."""

import sys
import time
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from gradwire_lab.report.machine_load import noted_in

QUIET_SECONDS = 10.0  # between plain lines of steps

LINES = {
    "decision": "auto, step {step}: {spec}, {why}",
    "restarted": "worker {worker} {why}; it is restarted",
    "back": "worker {worker} is back, at step {step}",
}
Record = dict[str, Any]


class Display:
    """Shows the records of one training."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(width=None if sys.stdout.isatty() else 160)
        columns = TextColumn("{task.description}"), TimeRemainingColumn(), TextColumn("left")
        self._live = Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        self._start: Record = {}
        self._last: Record = {}
        self._tested: Record = {}
        self._printed = time.monotonic()

    def __enter__(self) -> "Display":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._live.stop()

    def show(self, record: Record) -> None:
        shown = {"start": self._show_start, "step": self._show_step, "epoch": self._show_epoch, "final": self._show_end}
        if record["event"] in shown:
            shown[record["event"]](record)
        else:
            self._print(LINES[record["event"]].format(**record))

    def _show_start(self, record: Record) -> None:
        self._start = self._last = record
        self._print(
            f"{_workers(record)} {record['device']}, {record['parameters']:,} parameters, "
            f"{record['batch']} examples a worker and step, {record['steps_per_epoch']} steps an epoch"
        )
        self._print(record["method"])
        if "start_warning" in record:
            self._print(record["start_warning"])
        if (load := noted_in(record)) is not None and load.busy:
            self._print(f"this machine is busy with other work ({load}): the times of this run mean little")
        if record["step"] >= record["steps"]:
            self._print(f"this run has ended already, at step {record['step']}: nothing is left to train")
        elif record["step"]:
            self._print(f"continuing from step {record['step']} of {record['steps']}")
        for task in self._live.task_ids:
            self._live.remove_task(task)  # the first worker has come back, and begins again
        self._live.add_task("", total=record["steps"], completed=record["step"])
        self._live.start()

    def _show_step(self, record: Record) -> None:
        speed, self._last = self._speed(record), record
        if not self._live.disable:
            (task,) = self._live.task_ids
            self._live.update(task, description=self._short(record, speed), completed=record["step"])
        elif time.monotonic() - self._printed > QUIET_SECONDS:
            known = f"  {_metric(self._tested)}" if self._tested else ""
            self._print(
                f"epoch {record['epoch']:6.2f}  loss {record['loss']:.4f}{known}  {speed:,.0f} examples/s  "
                f"{_bytes(record)}  {self._left(record)} left"
            )

    def _short(self, record: Record, speed: float) -> str:
        """A line that leaves room for the time that is left, in a terminal of 80 columns too."""
        tested = self._tested
        known = f"  {tested['metric']} {_value(tested, tested['value'])}" if tested else ""
        return f"epoch {record['epoch']:.2f}  loss {record['loss']:.4f}{known}  {speed:,.0f} ex/s  {_cost(record)}"

    def _show_epoch(self, record: Record) -> None:
        self._last = self._tested = record  # the time of a test is none of training
        self._print(
            f"epoch {record['epoch']:6.2f}  loss {record['train_loss']:.4f}  {_metric(record)}  "
            f"{_bytes(record) if self._live.disable else _cost(record)}{_apart(record)}  {record['seconds']:.1f} s"
        )

    def _show_end(self, record: Record) -> None:
        self._live.stop()
        if "metric" in record:
            self.console.print(summary(record))

    def _speed(self, record: Record) -> float:
        """Examples a second, of all workers."""
        steps = record["step"] - self._last["step"]
        seconds = record["seconds"] - self._last["seconds"]
        examples: float = steps * self._start["batch"] * self._start["world"]
        return examples / max(1e-9, float(seconds))

    def _left(self, record: Record) -> str:
        """How long the rest will take, if it goes on as in this session."""
        steps, seconds = (record[name] - self._start[name] for name in ("step", "seconds"))
        left = round(seconds / max(1, steps) * (self._start["steps"] - record["step"]))
        return str(timedelta(seconds=left))

    def _print(self, line: str) -> None:
        self._printed = time.monotonic()
        self.console.print(Text(line))


def summary(final: Record) -> Table:
    """The closing table."""
    table = Table.grid(padding=(0, 2))
    table.add_row(
        final["metric"], f"{_value(final, final['value'])} at the end, {_value(final, final['best'])} at the best"
    )
    who = "by each worker" if "hosts" not in final else f"by the first worker, between {final['hosts']} hosts"
    cost = f"{_size(final['sent'])} {who}, {_less(final['wire_ratio'], 'a float32 ring')}"
    table.add_row("sent", cost if final["sent"] else "nothing")
    if "hosts" in final:
        table.add_row("inside", f"{_size(final['sent_inside'])} of float32 by the first worker, to its host's")
    size = f"{_size(final['payload'])}, {_less(final['payload_ratio'], 'float32')}"
    table.add_row("payload", size if final["payload"] else "nothing")
    parts = ", ".join(f"{part} {final[f'{part}_seconds']:.1f}" for part in ("encode", "wire", "decode"))
    table.add_row("seconds", f"{final['seconds']:.1f}, of which {parts}")
    if final["skipped"]:
        table.add_row("skipped", f"{final['skipped']} steps, whose gradients were not finite")
    if left := final.get("since_round"):
        lost = f"the last {left} steps ended no round" if left > 1 else "the last step ended no round"
        table.add_row("lost", f"{lost}, and the outer weights, which were evaluated, lack what was learned in them")
    return table


def _workers(start: Record) -> str:
    if start["world"] == 1:
        return "1 worker on"
    return f"{start['world']} {'simulated workers on' if start['simulated'] else 'workers, the first on'}"


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


def _cost(record: Record) -> str:
    """The same in few letters, for terminals of 80 columns."""
    return f"{_size(record['sent'])}, {_times(record['payload_ratio'])}"


def _bytes(record: Record) -> str:
    return f"{_size(record['sent'])} sent, payload {_smaller(record['payload_ratio'])}"


def _smaller(ratio: float) -> str:
    """Beside float32; ``1.0x smaller`` would say little."""
    return f"{_times(ratio)} smaller" if ratio >= 1.05 else "as in float32"


def _less(ratio: float, other: str) -> str:
    return f"{ratio:,.1f}x less than {other}" if ratio >= 1.05 else f"as much as {other}"


def _size(n: float) -> str:
    return f"{n / 1e6:,.2f} MB" if n >= 1e6 else f"{n / 1e3:,.2f} kB"


def _times(ratio: float) -> str:
    return f"{ratio:,.0f}x" if ratio >= 10 else f"{ratio:.1f}x"  # 1.5 is neither one nor two
