"""What ``gradwire advise`` prints of local steps: why, which there are, and what a training takes with them."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from gradwire_lab.cli.fitted_table import FittedTable
from gradwire_lab.perf_model.accuracy_records import AccuracyRecord, in_words
from gradwire_lab.perf_model.advice import Advice
from gradwire_lab.perf_model.calibration import Calibration
from gradwire_lab.perf_model.local_steps import FASTER, LocalAdvice, LocalComparison, trainings
from gradwire_lab.perf_model.model import DENSE
from gradwire_lab.perf_model.training_time import START, STEPS, Phase, SingleSteps, TrainingTime
from gradwire_lab.report.numbers import in_bytes, in_seconds

HEADS = (
    "H",
    "start",
    "ms a step",
    "of a step without network",
    "sent a step",
    f"{STEPS:,} steps",
    "more loss than dense",
    "seeds",
)
SPARE = ("of a step without network", "sent a step")  # what a narrow terminal does without


def why_local(found: Calibration, rounds: LocalComparison) -> str:
    """Why local steps, and why these; or why none."""
    chosen, single, waiting = rounds.chosen, rounds.single, _waiting(found, rounds.single)
    if chosen is None:
        return (
            f"{waiting}Local steps are not recommended: of those that were trained, none make {STEPS:,} steps "
            f"{FASTER:g} times faster."
        )
    limit, lost = in_percent(rounds.max_loss), in_percent(chosen.increase)
    take = f"Take local steps if about {lost} more loss will do" if rounds.loses_more else "Better take local steps"
    text = (
        f"{waiting}{take}: workers exchange weights after H steps of their own, and {STEPS:,} steps take "
        f"{in_seconds(chosen.total_seconds)} instead of {in_seconds(single.total_seconds)}. Of those that were trained"
    )
    if rounds.loses_more:
        return (
            f"{text} and make all steps {FASTER:g} times faster, all lost more than {limit}, the limit. "
            f"Of those {FASTER:g} times faster, H = {chosen.lengths} lost least; "
            f"--max-loss {math.ceil(1000 * chosen.increase) / 10:g} accepts that."
        )
    return (
        f"{text}, lost at most {limit} more than dense (--max-loss) and make all steps {FASTER:g} times faster, "
        f"H = {chosen.lengths} {_why_these(rounds.choices, chosen, rounds.max_loss)}"
    )


def _waiting(found: Calibration, single: SingleSteps) -> str:
    """How long a step is with the best of single steps, and whether that is due to bytes."""
    compute, spec = found.compute, found.model.called(single.spec)
    unlimited, start = single.unlimited_seconds / STEPS, " on average, start included" * (len(single.phases) > 1)
    if unlimited - compute > (single.mean_seconds - compute) / 2:
        return (
            f"\nA step with {spec} takes {_times(single.mean_seconds, compute)}{start}. On a link without a limit it "
            f"would take {_times(unlimited, compute)}: coding, delays and software cost more here than bytes. "
        )
    return (
        f"\nThis link is too slow for {spec} in every step: one takes {_times(single.mean_seconds, compute)}{start}. "
    )


def _why_these(choices: Sequence[LocalAdvice], chosen: LocalAdvice, max_loss: float) -> str:
    """Why these rounds, and what faster ones would lose."""
    faster = [one for one in choices if one.total_seconds < chosen.total_seconds]
    is_fastest = all(one.increase > max_loss for one in faster)
    why = "is the fastest." if is_fastest else "takes hardly longer than the fastest, and loses less."
    lossy = [
        f"H = {one.lengths} would take {in_seconds(one.total_seconds)}, but lose {in_percent(one.increase)}"
        for one in faster
        if one.increase > max_loss
    ]
    return f"{why} {'; '.join(lossy)}." if lossy else why


def not_trained(advice: Advice, compute: float, H: int = 15) -> str:
    """What local steps would save where none were trained with the optimizer; nothing, if they would not."""
    dense = next((way for way in advice.ways if way.spec == DENSE[0]), advice.dense).shared(H)
    if dense.seconds >= advice.choice.seconds:
        return ""
    return (
        f"\nWith local steps, such as local_sgd(H={H}), which sends float32 once in {H} steps, a step would take "
        f"{in_ms(dense.seconds)} instead of {in_ms(advice.choice.seconds)} (without network {in_ms(compute)}), but "
        f"none were trained with {advice.optimizer} here, so that what they lose is not known (docs/choose.md)."
    )


def phases_text(chosen: LocalAdvice) -> str:
    """What the start and the rounds of a training cost on this link, and all of it."""
    first, phases = chosen.phases[0], "; then ".join(map(_phase, chosen.phases))
    text = (
        f"{'The start: ' * (first.H is None)}{phases}. If there are {STEPS:,} steps, all take "
        f"{in_seconds(chosen.total_seconds)}, and a worker sends {in_bytes(chosen.total_sent)}. The training that tells"
        f" its loss sent {chosen.loss.payload_ratio:,.0f} times fewer bytes than float32, start included."
    )
    cheaper = (
        " The start takes longer than the rest. With first=None it sends nothing, if all workers take the same batches "
        "(docs/local.md#the-start); a shorter one, start=N, is cheaper, too. Both lost more "
        "where they were trained (docs/local.md#what-was-measured)."
    )
    return text + cheaper * (first.H is None and 2 * first.steps * first.seconds > chosen.total_seconds)


def _phase(phase: Phase) -> str:
    how = f"sent as {START}" if phase.H is None else f"H = {phase.H}"
    whole = in_seconds(phase.steps * phase.seconds)
    return f"{phase.steps:,} steps of {in_ms(phase.seconds)}, {how}, {in_bytes(phase.sent)} each, = {whole}"


def _times(seconds: float, compute: float) -> str:
    return f"{seconds / compute:,.3g} times its computing"


def local_table(found: Calibration, rounds: LocalComparison) -> FittedTable:
    """Single steps, and rounds of several lengths and of schedules, with what they cost."""
    rows = [_row(_every_step(found, rounds.single), rounds.single, found.compute)]
    for one in rounds.choices:
        rows.append(_row(f"{one.lengths}{' *' * (one == rounds.chosen)}", one, found.compute))
    return FittedTable("", HEADS, rows, SPARE, (), _origin(found.model.kind, rounds), "--json")


def _every_step(found: Calibration, single: SingleSteps) -> str:
    return f"every step, {found.model.called(single.spec)}"


def _row(name: str, one: SingleSteps | LocalAdvice, compute: float) -> tuple[str, ...]:
    """Cells of a table; those of a schedule have several figures, from its first rounds to its last ones."""
    parts = [phase for phase in one.phases if phase.H is not None] or one.phases[-1:]
    cells = (
        [f"{1e3 * phase.seconds:,.1f}" for phase in parts],
        [f"{phase.seconds / compute:.3g}" for phase in parts],
        [in_bytes(phase.sent) for phase in parts],
    )
    figures = map(", then ".join, cells)
    losses = one.losses if isinstance(one, SingleSteps) else (one.loss,)
    lost = "not known" if one.increase is None else in_percent(one.increase)
    start = f"{_start_steps(one):,}" if _start_steps(one) else ""
    return name, start, *figures, in_seconds(one.total_seconds), lost, str(sum(each.seeds for each in losses) or "")


def _start_steps(one: SingleSteps | LocalAdvice) -> int:
    """Steps of the start, which a total has, and the other figures of a row do not."""
    first = one.phases[:-1] if isinstance(one, SingleSteps) else one.phases
    return sum(phase.steps for phase in first if phase.H is None)


def _origin(kind: str, rounds: LocalComparison) -> str:
    """Where the losses of the table come from."""
    single, choices = rounds.single, rounds.choices
    shown = [one.loss for one in choices]
    tasks = dict.fromkeys(f"{one.task}, {one.workers} workers" for one in shown)
    missing = (kind or shown[0].kind, single.optimizer) != (shown[0].kind, shown[0].optimizer)
    none = f", as there are none of {kind or 'other'} models with {single.optimizer}" * missing
    kept = " H = 1 needs keep=1.0." * ("keep" in shown[0].spec)
    others = [one for one in trainings(single.optimizer, kind) if one.task not in {other.task for other in shown}]
    more = f" More: {'; '.join(map(_elsewhere, others))}." * bool(others)
    above = f"lost least of those {FASTER:g} times faster, but more than the limit"
    star = f"* {above if rounds.loses_more else 'recommended'}. " * (rounds.chosen is not None)
    losses = f"{star}Losses are those of {in_words(shown)}{none}: {'; '.join(tasks)}, {STEPS:,} steps."
    mean = f" That of {single.spec} is a mean of {in_words(single.losses)}." * bool(single.losses)
    return losses + mean + kept + "".join(_notes(choices)) + more


def _notes(choices: Sequence[LocalAdvice]) -> Iterator[str]:
    """What else one should know of the trainings."""
    for note in dict.fromkeys(one.loss.note for one in choices if one.loss.note):
        yield f" H = {' and '.join(one.lengths for one in choices if one.loss.note == note)}: {note}."


def _elsewhere(record: AccuracyRecord) -> str:
    who = f"{record.task} with {record.optimizer}, {record.seeds} seed{'s' * (record.seeds > 1)}"
    return f"{record.spec} {in_percent(-record.gain)} ({who})"


def in_percent(share: float) -> str:
    return f"{100 * share:.2g} %"


def comparison_object(rounds: LocalComparison) -> dict[str, Any]:
    """As JSON has it."""
    chosen = {"H": None} if rounds.chosen is None else _round_object(rounds.chosen)
    whole = {"choices": [*map(_round_object, rounds.choices)], "every_step": _single_object(rounds.single)}
    return {**chosen, **whole, "max_loss": rounds.max_loss, "loses_more": rounds.loses_more}


def _round_object(one: LocalAdvice) -> dict[str, Any]:
    loss = {"increase": one.increase, "evidence": [asdict(one.loss)]}
    return {**asdict(one), "H": one.H, **_times_and_bytes(one), "loss": loss}


def _single_object(one: SingleSteps) -> dict[str, Any]:
    loss = {"increase": one.increase, "evidence": [*map(asdict, one.losses)]}
    phases = [asdict(phase) for phase in one.phases]
    return {"spec": one.spec, "phases": phases, **_times_and_bytes(one), "loss": loss}


def _times_and_bytes(one: TrainingTime) -> dict[str, float]:
    figures = {"seconds": one.seconds, "sent": one.sent, "total_seconds": one.total_seconds}
    return {**figures, "total_sent": one.total_sent}


def in_ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 0.9995 else f"{seconds:,.3g} s"
