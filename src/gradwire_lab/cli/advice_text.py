"""What ``gradwire advise`` prints: a table, a verdict in words, and the same as an object."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table
from rich.text import Text

from gradwire.comm.rates import FASTEST_BITS, SLOWEST_BITS, LinkSpec
from gradwire.engine.method import method
from gradwire.engine.plan import BUCKET_BYTES
from gradwire_lab.cli.fitted_table import FittedTable
from gradwire_lab.cli.output import make_table
from gradwire_lab.perf_model.accuracy_records import free_of_losses, records_of
from gradwire_lab.perf_model.advice import Advice, RateRange
from gradwire_lab.perf_model.calibration import Calibration
from gradwire_lab.perf_model.candidates import arguments
from gradwire_lab.perf_model.cluster import Cluster
from gradwire_lab.perf_model.costs import Prediction
from gradwire_lab.perf_model.local_steps import TOO_SLOW, LocalAdvice, local_steps
from gradwire_lab.perf_model.model import DENSE
from gradwire_lab.report.numbers import in_bytes

COLUMNS = ("method", "step", "compute", "encode", "wire", "decode", "hidden", "sent")
SPARE = ("compute", "hidden", "decode", "encode", "wire")  # what a narrow terminal does without, first to last
_WIDE = 150  # columns, from which on evidence has room


def advice_table(found: Calibration, cluster: Cluster, advice: Advice, barred: Sequence[str]) -> Callable[[int], Table]:
    """The table for a terminal of some width; a narrow one has the evidence of each spec in a word or two."""
    head, caption = _title(found, cluster), f"{found.note}. step = compute + encode + wire + decode - hidden"
    rows = [(found.model.called(way.spec), *_figures(way)) for way in advice.ways]
    short = [(*row, _brief(way.spec, advice.adaptive, barred)) for row, way in zip(rows, advice.ways, strict=True)]
    long = [(*row, _evidence(way.spec, advice.adaptive, barred)) for row, way in zip(rows, advice.ways, strict=True)]
    narrow = FittedTable(head, (*COLUMNS, "evidence"), short, SPARE, ("evidence",), caption, "--json")

    def made(width: int) -> Table:
        if width < _WIDE:
            return narrow(width)
        columns = (*COLUMNS, "accuracy against dense")
        table = make_table(head, columns, (columns[0], columns[-1]), caption)
        for way, row in zip(advice.ways, long, strict=True):
            table.add_row(Text(row[0], style="bold" if way.spec == advice.choice.spec else ""), *row[1:])
        return table

    return made


def _title(found: Calibration, cluster: Cluster) -> str:
    place = f"{cluster.workers} workers" + (f" on {cluster.hosts} hosts" if cluster.per_host > 1 else "")
    return f"{found.model.elements:,} parameters, {place}, link {cluster.link}; milliseconds of a step, predicted"


def _figures(way: Prediction) -> tuple[str, ...]:
    split = way.split
    parts = (split.step, split.compute, split.encode, split.wire, split.decode, split.hidden)
    return *(f"{1e3 * part:,.1f}" for part in parts), in_bytes(way.sent)


def _evidence(spec: str, adaptive: bool, barred: Sequence[str]) -> str:
    return ("not taken: " if spec in barred else "") + _known(spec, adaptive)


def _brief(spec: str, adaptive: bool, barred: Sequence[str]) -> str:
    """How much accuracy the project's trainings lost, and whether the spec may be taken."""
    if spec in DENSE:
        return ""
    lost = "lost < 1 %" if free_of_losses([spec], adaptive) else "lost > 1 %"
    found = lost if records_of(spec, adaptive) else "none yet"
    return f"{found}; not taken" if spec in barred else found


def _known(spec: str, adaptive: bool) -> str:
    if spec in DENSE:
        return ""
    doubt = "" if free_of_losses([spec], adaptive) else "lost accuracy: "
    return doubt + ("; ".join(map(str, records_of(spec, adaptive))) or "no evidence yet")


def verdict(found: Calibration, cluster: Cluster, advice: Advice, limit: tuple[str, RateRange | None]) -> str:
    return "\n".join(filter(None, (_single_steps(found, cluster, advice, limit), _local_steps(found, cluster, advice))))


def _local_steps(found: Calibration, cluster: Cluster, advice: Advice) -> str:
    """What to do where the link slows down even the choice."""
    choice, rounds = advice.choice, local_steps(found, cluster)
    if choice.split.exposed <= TOO_SLOW * choice.split.compute or rounds is None:
        return ""
    times = choice.seconds / choice.split.compute
    return (
        f"No way to send every step is enough for this link: a step takes {times:,.3g} times its computing. Take local "
        f"steps, H = {rounds.H}: {_ms(rounds.seconds)} a step and {in_bytes(rounds.sent)}, and "
        f"{rounds.loss or 'a loss that no training here tells'}.\nouter = {rounds.call}"
    )


def _single_steps(found: Calibration, cluster: Cluster, advice: Advice, limit: tuple[str, RateRange | None]) -> str:
    dense = found.model.called(advice.dense.spec).removeprefix("ddp-")
    if not advice.compresses:
        text = f"Stay with {dense} DDP: {_ms(advice.dense.seconds)} a step."
        if advice.uncertain_gain is not None:
            way = advice.uncertain_gain
            text += f" {way.spec} would take {_ms(way.seconds)}, if all figures were exact; they are trusted to 15 %."
        return f"{text} {_until(*limit)}"
    choice = advice.choice
    return (
        f"Take {choice.spec}: {_ms(choice.seconds)} a step, {advice.speedup:.2g} times faster than {dense} DDP "
        f"({_ms(advice.dense.seconds)}), which is the better dense one. {_until(*limit)}\n"
        f"Accuracy: {_known(choice.spec, advice.adaptive)}\n"
        f"wire = gradwire.compress(model, {_arguments(choice, cluster)})"
    )


def _arguments(choice: Prediction, cluster: Cluster) -> str:
    """The arguments of `gradwire.compress`, in Python."""
    spec, options = arguments(choice.spec)
    keywords: dict[str, Any] = {**options, "across": "hosts"} if cluster.per_host > 1 else dict(options)
    if choice.bucket_bytes != BUCKET_BYTES:
        keywords["bucket_mb"] = choice.bucket_bytes // 2**20
    named = [f"{key}={json.dumps(value) if value else value}" for key, value in keywords.items()]
    if method(spec).feedback.needs_denominator:
        named.append("optimizer=gradwire.AdamW(model.parameters())")
    return ", ".join([json.dumps(spec), *named])


def _until(spec: str, span: RateRange | None) -> str:
    if span is None:
        return f"{spec} would not pay on any link."
    low, high = (LinkSpec(float(f"{bits:.2g}")) for bits in span)
    if span.low > SLOWEST_BITS:
        return f"{spec} pays on links above {low}" + (f" and below {high}." if span.high < FASTEST_BITS else ".")
    return f"{spec} pays on links below {high}." if span.high < FASTEST_BITS else f"{spec} pays on any link."


def _paying(spec: str, span: RateRange | None) -> dict[str, Any]:
    low, high = span or (None, None)
    return {"spec": spec, "bits_per_second": high, "from_bits_per_second": low}


def as_object(
    found: Calibration, cluster: Cluster, advice: Advice, limit: tuple[str, RateRange | None]
) -> dict[str, Any]:
    return {
        "link": str(cluster.link),
        "workers": cluster.workers,
        "per_host": cluster.per_host,
        "parameters": found.model.elements,
        "dtype": found.model.dtype,
        "note": found.note,
        "choice": found.model.called(advice.choice.spec),
        "compresses": advice.compresses,
        "dense": found.model.called(advice.dense.spec),
        "speedup": advice.speedup,
        "break_even": _paying(*limit),
        "local_steps": _rounds(local_steps(found, cluster)),
        "ways": [
            {
                "spec": found.model.called(way.spec),
                "seconds": way.seconds,
                **asdict(way.split),
                "hidden": way.split.hidden,
                "sent": way.sent,
                "collectives": way.collectives,
                "bucket_bytes": way.bucket_bytes,
                "launch_bytes": way.bucket_bytes,  # its old name, for one release
                "evidence": [] if way.spec in DENSE else [asdict(one) for one in records_of(way.spec, advice.adaptive)],
            }
            for way in advice.ways
        ],
    }


def _rounds(rounds: LocalAdvice | None) -> dict[str, Any] | None:
    if rounds is None:
        return None
    return {**asdict(rounds), "loss": None if rounds.loss is None else asdict(rounds.loss)}


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 0.9995 else f"{seconds:,.3g} s"
