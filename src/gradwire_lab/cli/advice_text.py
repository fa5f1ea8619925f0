"""What ``gradwire advise`` prints: a table, a verdict in words, and the same as an object."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from gradwire.comm.rates import FASTEST_BITS, SLOWEST_BITS, LinkSpec
from gradwire.engine.method import method
from gradwire.engine.plan import BUCKET_BYTES
from gradwire_lab.cli.fitted_table import FittedTable
from gradwire_lab.perf_model.accuracy_records import AccuracyRecord, free_of_losses, is_adaptive, records_of
from gradwire_lab.perf_model.advice import Advice, RateRange
from gradwire_lab.perf_model.calibration import Calibration
from gradwire_lab.perf_model.candidates import arguments, local_rounds, suits_adaptive
from gradwire_lab.perf_model.cluster import Cluster
from gradwire_lab.perf_model.costs import Prediction
from gradwire_lab.perf_model.local_steps import START, STEPS, TASK, WAITING, LocalAdvice, LossEstimate, elsewhere
from gradwire_lab.perf_model.model import DENSE
from gradwire_lab.report.numbers import in_bytes, in_seconds

COLUMNS = ("method", "step", "compute", "encode", "wire", "decode", "hidden", "sent")
SPARE = ("compute", "hidden", "decode", "encode", "wire")  # what a narrow terminal does without, first to last


def advice_table(found: Calibration, cluster: Cluster, advice: Advice, barred: Sequence[str]) -> FittedTable:
    """What is predicted for each way, and its evidence in a word or two."""
    named = " no: not taken, unless --specs names it." if barred else ""
    caption = f"{found.note}. step = compute + encode + wire + decode - hidden.{named} --json has all evidence."
    rows = [
        (found.model.called(way.spec), *_figures(way), _brief(way.spec, advice.optimizer, barred))
        for way in advice.ways
    ]
    return FittedTable(_title(found, cluster), (*COLUMNS, "evidence"), rows, SPARE, ("evidence",), caption, "--json")


def _title(found: Calibration, cluster: Cluster) -> str:
    place = f"{cluster.workers} workers" + (f" on {cluster.hosts} hosts" if cluster.per_host > 1 else "")
    return f"{found.model.elements:,} parameters, {place}, link {cluster.link}; predicted, ms"


def _figures(way: Prediction) -> tuple[str, ...]:
    split = way.split
    parts = (split.step, split.compute, split.encode, split.wire, split.decode, split.hidden)
    return *(f"{1e3 * part:,.1f}" for part in parts), in_bytes(way.sent)


def _brief(spec: str, optimizer: str, barred: Sequence[str]) -> str:
    """How much accuracy the project's trainings lost, or why the spec is not taken."""
    if spec in DENSE:
        return ""
    lost = "lost < 1 %" if free_of_losses([spec], optimizer) else "lost > 1 %"
    found = lost if records_of(spec, optimizer) else "never trained"
    if spec not in barred:
        return found
    return f"no: starves {optimizer}" if is_adaptive(optimizer) and not suits_adaptive(spec) else f"no: {found}"


def why_local(
    advice: Advice, compute: float, choices: Sequence[LocalAdvice], chosen: LocalAdvice | None, max_loss: float
) -> str:
    """Why local steps, and why these."""
    text = (
        f"\nThis link is too slow for {advice.choice.spec} in every step: one takes "
        f"{_times(advice.choice.seconds, compute)}. "
    )
    limit = f"at most {100 * max_loss:.3g} % more than dense (--max-loss)"
    if chosen is None:
        return f"{text}Local steps would be faster, but none that were trained lost {limit}."
    text += (
        "Better take local steps: workers exchange weights after H steps of their own. Of those that were trained and "
        f"lost {limit}, H = {chosen.H} is the "
    )
    if chosen.seconds <= (1 + WAITING) * compute:
        return f"{text}shortest with which a step takes at most {1 + WAITING:.3g} times its computing."
    text += f"longest: a step still takes {_times(chosen.seconds, compute)}."
    longer = [
        f"H = {one.H} would take {_times(one.seconds, compute)}, but lose {_loss(one.loss)[0]}"
        for one in choices
        if one.H > chosen.H
    ]
    return f"{text} {'; '.join(longer)}." if longer else text


def not_trained(advice: Advice, compute: float, H: int = 15) -> str:
    """What local steps would save where none were trained with the optimizer; nothing, if they would not."""
    dense = next((way for way in advice.ways if way.spec == DENSE[0]), advice.dense).shared(H)
    if dense.seconds >= advice.choice.seconds:
        return ""
    return (
        f"\nWith local steps, such as local_sgd(H={H}), which sends float32 once in {H} steps, a step would take "
        f"{_ms(dense.seconds)} instead of {_ms(advice.choice.seconds)} (without network {_ms(compute)}), but none were "
        f"trained with {advice.optimizer} here, so that what they lose is not known (docs/choose.md)."
    )


def start_text(first: Prediction, chosen: LocalAdvice) -> str:
    """What the start of a training costs on this link, beside the rest."""
    rounds = local_rounds(chosen.spec)
    assert rounds is not None
    before, after = rounds.start * first.seconds, (STEPS - rounds.start) * chosen.seconds
    text = (
        f"The start: {rounds.start} steps of {_ms(first.seconds)}, sent as {START}, = {in_seconds(before)}; then "
        f"{STEPS - rounds.start:,} steps of {_ms(chosen.seconds)} = {in_seconds(after)}, if there are {STEPS:,} in all."
    )
    cheaper = (
        " The start takes longer than the rest. With first=None it sends nothing, if all workers take the same batches "
        "(docs/local.md#the-start); a shorter one, start=N, is cheaper, too. Both lost more "
        "where they were trained (docs/local.md#what-was-measured)."
    )
    return text + cheaper * (before > after)


def _times(seconds: float, compute: float) -> str:
    return f"{seconds / compute:,.3g} times its computing"


def local_table(
    compute: float, optimizer: str, choices: Sequence[LocalAdvice], chosen: LocalAdvice | None
) -> FittedTable:
    """Rounds of several lengths, with what they cost."""
    heads = ("H", "ms a step", "of a step without network", "sent a step", "more loss than dense", "seeds")
    rows = [
        (
            f"{one.H}{' *' if one == chosen else ''}",
            f"{1e3 * one.seconds:,.1f}",
            f"{one.seconds / compute:.3g}",
            in_bytes(one.sent),
            *_loss(one.loss),
        )
        for one in choices
    ]
    return FittedTable("", heads, rows, (), (), _origin(optimizer, choices[0].H == 1), "--json")


def _origin(optimizer: str, keeps: bool) -> str:
    """Where the losses of the table come from."""
    more = elsewhere(optimizer)
    none = "" if optimizer in ("AdamW", *(one.optimizer for one in more)) else f", as there are none with {optimizer}"
    kept = "H = 1 needs keep=1.0. " if keeps else ""
    return (
        f"* recommended. Losses are of {TASK}, 8 workers, {STEPS:,} steps with AdamW{none}. {kept}H = 15 and 30 were "
        "compared with dense of the same short warm-up, which ends 3.7 % above dense at its best; shorter ones, with a "
        f"warm-up of 30 %, with dense at its best. More: {'; '.join(map(_elsewhere, more))}."
    )


def _elsewhere(record: AccuracyRecord) -> str:
    who = f"{record.task.split(', ')[-1]} with {record.optimizer}, {record.seeds} seed{'s' * (record.seeds > 1)}"
    return f"{record.spec} {-100 * record.gain:.2g} % ({who})"


def _loss(loss: LossEstimate | None) -> tuple[str, str]:
    """The loss, and the seeds of the trainings that tell it."""
    if loss is None:
        return "not known", ""
    return f"{100 * loss.increase:.2g} %", " and ".join(str(record.seeds) for record in loss.evidence)


def verdict(found: Calibration, advice: Advice, limit: tuple[str, RateRange | None], local: bool = False) -> str:
    """Whether to compress every step, and why; ``local``: local steps are better still."""
    dense = found.model.called(advice.dense.spec).removeprefix("ddp-")
    if not advice.compresses:
        stay = "If every step is to be sent, stay" if local else "Stay"
        text, way = f"\n{stay} with {dense} DDP: {_ms(advice.dense.seconds)} a step", advice.runner_up or advice.fastest
        if advice.uncertain_gain is not None:
            doubt = "would be faster if all figures were exact, but they are trusted to 15 %"
            return f"{text}. {way.spec} ({_ms(way.seconds)}) {doubt}. {_until(*limit)}"
        pays = "Compressing every step" if local else "Compression"
        return f"{text}. {pays} does not pay here: {way.spec} takes {_ms(way.seconds)}. {_until(*limit)}"
    choice = advice.choice
    records = records_of(choice.spec, advice.optimizer)
    evidence = "\n".join(f"- {one}" for one in records) or "- no evidence yet"
    lost = "had" if free_of_losses([choice.spec], advice.optimizer) else "lost more than a percent"
    take = "If every step is to be sent, take" if local else "Take"
    return (
        f"\n{take} {choice.spec}: {_ms(choice.seconds)} a step, {advice.speedup:.3g} times faster than {dense} DDP "
        f"({_ms(advice.dense.seconds)}), the fastest dense one. {_until(*limit)}{_needs(choice.spec)}\n"
        f"Against dense training it {lost}:\n{evidence}"
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
        f"The first {made.gradient_steps} steps{later} send gradients as {codecs}; with start=N they are N. Take as "
        "many as the learning rate's warm-up has. "
        if made.gradient_steps
        else ""
    )
    return f" {first}It needs gradwire.AdamW in place of torch's; give it the arguments of yours."


def call(choice: Prediction, cluster: Cluster) -> str:
    """The choice in Python."""
    if local_rounds(choice.spec.partition(";")[0]) is not None:
        return f'outer = gradwire.local(model, optimizer, "{choice.spec}")'
    return f"wire = gradwire.compress(model, {_arguments(choice, cluster)})"


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
    found: Calibration,
    cluster: Cluster,
    advice: Advice,
    limit: tuple[str, RateRange | None],
    rounds: tuple[Sequence[LocalAdvice], LocalAdvice | None] | None,
) -> dict[str, Any]:
    """All of it, as JSON has it."""
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
        "local_steps": None if rounds is None else {**_round(rounds[1]), "choices": [*map(_round, rounds[0])]},
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
                else [asdict(one) for one in records_of(way.spec, advice.optimizer)],
            }
            for way in advice.ways
        ],
    }


def _round(one: LocalAdvice | None) -> dict[str, Any]:
    if one is None:
        return {"H": None}
    return {**asdict(one), "loss": None if one.loss is None else asdict(one.loss)}


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 0.9995 else f"{seconds:,.3g} s"
