"""What ``gradwire advise`` prints: a table, a verdict in words, and the same as an object."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from gradwire.comm.rates import FASTEST_BITS, SLOWEST_BITS, LinkSpec
from gradwire.engine.method import method
from gradwire.engine.plan import BUCKET_BYTES
from gradwire_lab.cli.fitted_table import FittedTable
from gradwire_lab.cli.local_text import comparison_object, in_ms, in_percent
from gradwire_lab.perf_model.accuracy_records import free_of_losses, is_adaptive, records_of
from gradwire_lab.perf_model.advice import Advice, RateRange
from gradwire_lab.perf_model.calibration import Calibration
from gradwire_lab.perf_model.candidates import CANDIDATES, arguments, local_rounds, suits_adaptive
from gradwire_lab.perf_model.cluster import Cluster
from gradwire_lab.perf_model.costs import Prediction
from gradwire_lab.perf_model.local_steps import LocalComparison
from gradwire_lab.perf_model.model import DENSE
from gradwire_lab.perf_model.training_time import STEPS
from gradwire_lab.report.numbers import in_bytes

COLUMNS = ("method", "step", "compute", "encode", "wire", "decode", "hidden", "sent")
SPARE = ("compute", "hidden", "decode", "encode", "wire")  # what a narrow terminal does without, first to last


def advice_table(found: Calibration, cluster: Cluster, advice: Advice, barred: Sequence[str]) -> FittedTable:
    """What is predicted for each way, and its evidence in a word or two."""
    named = " no: not taken, unless --specs names it." if barred else ""
    kind = found.model.kind
    caption = (
        f"{found.note}. step = compute + encode + wire + decode - hidden.{named} Evidence is of "
        f"{kind or 'all kinds of'} models with {advice.optimizer}, unless it names others. --json has all of it."
    )
    rows = [
        (found.model.called(way.spec), *_figures(way), _brief(way.spec, advice, kind, barred)) for way in advice.ways
    ]
    return FittedTable(_title(found, cluster), (*COLUMNS, "evidence"), rows, SPARE, ("evidence",), caption, "--json")


def _title(found: Calibration, cluster: Cluster) -> str:
    place = f"{cluster.workers} workers" + (f" on {cluster.hosts} hosts" if cluster.per_host > 1 else "")
    return f"{found.model.elements:,} parameters, {place}, link {cluster.link}; predicted, ms"


def _figures(way: Prediction) -> tuple[str, ...]:
    split = way.split
    parts = (split.step, split.compute, split.encode, split.wire, split.decode, split.hidden)
    return *(f"{1e3 * part:,.1f}" for part in parts), in_bytes(way.sent)


def _brief(spec: str, advice: Advice, kind: str, barred: Sequence[str]) -> str:
    """How much accuracy the project's trainings lost, or why the spec is not taken."""
    if spec in DENSE:
        return ""
    optimizer, limit = advice.optimizer, advice.max_loss
    records = records_of(spec, optimizer, kind)
    lost = f"lost {'<' if free_of_losses([spec], optimizer, kind, limit) else '>'} {in_percent(limit)}"
    others = {one.kind for one in records if kind} | {one.optimizer for one in records}
    others -= {kind, optimizer}
    found = lost + f" ({', '.join(sorted(others))})" * bool(others) if records else _untrained(spec)
    if spec not in barred:
        return found
    return f"no: starves {optimizer}" if is_adaptive(optimizer) and not suits_adaptive(spec) else f"no: {found}"


def _untrained(spec: str) -> str:
    """What to say of a spec without records."""
    return f"start={method(spec).gradient_steps} never trained" if _shares_momentum(spec) else "never trained"


def verdict(found: Calibration, advice: Advice, limit: tuple[str, RateRange | None], local: bool = False) -> str:
    """Whether to compress every step, and why; ``local``: local steps are better still."""
    dense = found.model.called(advice.dense.spec).removeprefix("ddp-") + " DDP"
    if advice.compresses:
        return _take(found, advice, dense, limit, local)
    stay = "If every step is to be sent, stay" if local else "Stay"
    text = f"\n{stay} with {dense}: {in_ms(advice.dense.seconds)} a step"
    way = advice.runner_up or advice.fastest
    if advice.uncertain_gain is not None:
        doubt = "would be faster if all figures were exact, but they are trusted to 15 %"
        return f"{text}. {way.spec} ({in_ms(way.seconds)}) {doubt}. {_until(*limit)}"
    pays = "Compressing every step" if local else "Compression"
    return f"{text}. {pays} does not pay here: {way.spec} takes {in_ms(way.seconds)}. {_until(*limit)}"


def _take(found: Calibration, advice: Advice, dense: str, limit: tuple[str, RateRange | None], local: bool) -> str:
    """What to take, what it needs, and what is known of its loss."""
    choice = advice.choice
    records = records_of(choice.spec, advice.optimizer, found.model.kind)
    evidence = "\n".join(f"- {one}" for one in records) or f"- no evidence yet: {_untrained(choice.spec)}"
    bearable = free_of_losses([choice.spec], advice.optimizer, found.model.kind, advice.max_loss)
    lost = "had" if bearable else f"lost more than {in_percent(advice.max_loss)}"
    started, trained = "", ""
    if _shares_momentum(choice.spec):  # of these, trainings with another start are no evidence
        listed = choice.spec in CANDIDATES  # and was trained for this many steps
        started, trained = " after its start", f", in {STEPS:,} steps with this start" if records and listed else ""
    take = "If every step is to be sent, take" if local else "Take"
    return (
        f"\n{take} {choice.spec}: {in_ms(choice.seconds)} a step{started}, {advice.speedup:.3g} times faster than "
        f"{dense} ({in_ms(advice.dense.seconds)}), the fastest dense one. {_until(*limit)}{_needs(choice.spec)}\n"
        f"Against dense training it {lost}{trained}:\n{evidence}"
    )


def _needs(spec: str) -> str:
    """What the owner of the training has to arrange."""
    text = spec.partition(";")[0]
    rounds = local_rounds(text)
    if rounds is not None:
        return f" The first {rounds.start} steps send gradients." if rounds.start else ""
    made = method(text)
    if not made.feedback.needs_denominator:
        return ""
    later = ", and a few later ones," if made.refresh else ""
    codecs = " and ".join(str(chosen) for step, chosen in made.table if step < made.gradient_steps)
    first = (
        f"The first {made.gradient_steps} steps{later} send gradients as {codecs}. How many yours should be depends on "
        "the length of your training: write start=N, the longer of the learning rate's warm-up and 15 % of the "
        "training, but no fewer than 100 steps (docs/adamw.md). That is 150 of 1,000 steps, and 15,000 of 100,000. "
        if made.gradient_steps
        else ""
    )
    return f" {first}It needs gradwire.AdamW in place of torch's; give it the arguments of yours."


def call(choice: Prediction, cluster: Cluster) -> str:
    """The choice in Python."""
    if local_rounds(choice.spec.partition(";")[0]) is not None:
        return f'outer = gradwire.local(model, optimizer, "{choice.spec}")'
    made = f"wire = gradwire.compress(model, {_arguments(choice, cluster)})"
    return f"optimizer = gradwire.AdamW(model.parameters())\n{made}" if _shares_momentum(choice.spec) else made


def _shares_momentum(spec: str) -> bool:
    """Whether a spec compresses the momentum of `gradwire.AdamW`, which the training has to step with, too."""
    return method(arguments(spec)[0]).feedback.needs_denominator


def _arguments(choice: Prediction, cluster: Cluster) -> str:
    """The arguments of `gradwire.compress`, in Python."""
    spec, options = arguments(choice.spec)
    keywords: dict[str, Any] = {**options, "across": "hosts"} if cluster.per_host > 1 else dict(options)
    if choice.bucket_bytes != BUCKET_BYTES:
        keywords["bucket_mb"] = choice.bucket_bytes // 2**20
    named = [f"{key}={json.dumps(value) if value else value}" for key, value in keywords.items()]
    if _shares_momentum(choice.spec):
        named.append("optimizer=optimizer")
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
    found: Calibration,
    cluster: Cluster,
    advice: Advice,
    limit: tuple[str, RateRange | None],
    rounds: LocalComparison | None,
) -> dict[str, Any]:
    """All of it, as JSON has it."""
    return {
        "link": str(cluster.link),
        "workers": cluster.workers,
        "per_host": cluster.per_host,
        "parameters": found.model.elements,
        "dtype": found.model.dtype,
        "kind": found.model.kind,
        "note": found.note,
        "choice": found.model.called(advice.choice.spec),
        "compresses": advice.compresses,
        "dense": found.model.called(advice.dense.spec),
        "speedup": advice.speedup,
        "break_even": _paying(*limit),
        "local_steps": None if rounds is None else comparison_object(rounds),
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
                "evidence": []
                if way.spec in DENSE
                else [asdict(one) for one in records_of(way.spec, advice.optimizer, found.model.kind)],
            }
            for way in advice.ways
        ],
    }
