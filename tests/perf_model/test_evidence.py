"""What the accuracy records say of a GPT is what the published rows say."""

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import pytest

from gradwire_lab.perf_model.accuracy_records import (
    AccuracyRecord,
    accuracy_records,
    free_of_losses,
    in_words,
    records_of,
)
from gradwire_lab.perf_model.candidates import weighed
from gradwire_lab.perf_model.local_steps import SPARSE, lengths, trained, trainings
from gradwire_lab.perf_model.model import ModelProfile
from gradwire_lab.train.models import build

RESULTS = Path(__file__).parents[2] / "docs" / "results"
TASK = "WikiText-2 as bytes, gpt of 10.9 M"
SOURCES = "Python sources, gpt of 10.9 M"
LARGE, TINY = "WikiText-2 as bytes, gpt of 114 M", "WikiText-2 as bytes, gpt of 0.13 M"
ROUND = "sparseloco(H={}, start={}, scales='bf16')"
KEPT = "sparseloco(H=1, keep=1.0, start={}, scales='bf16')"
SLOWER = "sparseloco(H=5, rate=0.7, start=225, scales='bf16')"
NO_START = "sparseloco(H=1, keep=1.0, scales='bf16')"
LATER, GROWING, EARLIER = (
    f"local_schedule({{0: {NO_START}, {step}: sparseloco(H=5, rate=0.7, scales='bf16')}})" for step in (1100, 1000, 750)
)


class Rows(NamedTuple):
    """Rows of a file that have these values."""

    file: str
    values: dict[str, Any]

    def losses(self) -> dict[int, list[float]]:
        """By seed."""
        found: dict[int, list[float]] = {}
        for row in map(json.loads, (RESULTS / self.file).read_text().splitlines()):
            if all(row.get(key) == value for key, value in self.values.items()):
                found.setdefault(row["seed"], []).append(row["test_loss"])
        return found


def local(**values: Any) -> Rows:
    return Rows("local-h200.jsonl", {"lr": 0.002, "workers": 8, **values})


def warm(**values: Any) -> Rows:
    return Rows("warm-up-h200.jsonl", values)


def muon(name: str, text: str = "wikitext-2", **values: Any) -> Rows:
    return Rows("muon-h200.jsonl", {"name": name, "text": text, **values})


def tiny(spec: str, optimizer: str) -> Rows:
    return Rows(
        "int8-cpu.jsonl", {"spec": spec, "optimizer": optimizer, "lr": {"adamw": 0.004, "muon": 0.016}[optimizer]}
    )


BEST = warm(spec="dense", lr=0.004, warm_up=450, inner="adamw")
SAME = local(name="dense")
PUBLISHED: list[tuple[str, str, str, Rows, Rows]] = [
    ("int4", TASK, "AdamW", warm(name="int4"), BEST),
    ("onebit_adam(start=250)", TASK, "AdamW", warm(name="onebit", lr=0.004, warm_up=450), BEST),
    ("zero_one_adam(start=215)", TASK, "AdamW", warm(name="zero one", lr=0.004, warm_up=450), BEST),
    (
        "zero_one_adam(start=150)",
        TASK,
        "AdamW",
        Rows("adamw-h200.jsonl", {"name": "zero one 150"}),
        Rows("adamw-h200.jsonl", {"name": "dense", "lr": 0.002, "compiled": True}),
    ),
    (KEPT.format(55), TASK, "AdamW", warm(H=1, lr=0.002, warm_up=450, start=55), BEST),
    (KEPT.format(37), LARGE, "AdamW", warm(name="114 M, keep"), warm(name="114 M, dense")),
    *(
        (spec, LARGE, "AdamW", warm(name=f"114 M, {name}"), warm(name="114 M, dense"))
        for spec, name in (("onebit_adam(start=300)", "onebit"), ("int4", "int4"))
    ),
    (ROUND.format(1, 225), TASK, "AdamW", local(name="H 1"), SAME),
    (ROUND.format(5, 225), TASK, "AdamW", local(name="center"), SAME),
    (ROUND.format(15, 225), TASK, "AdamW", local(name="H 15"), SAME),
    (ROUND.format(30, 225), TASK, "AdamW", local(name="H 30"), SAME),
    ("diloco(H=30, start=225)", TASK, "AdamW", local(name="diloco H 30"), SAME),
    (
        ROUND.format(5, 150),
        LARGE,
        "AdamW",
        Rows("local-h200.jsonl", {"name": "100 M, center"}),
        Rows("adamw-h200.jsonl", {"name": "100 M, dense"}),
    ),
    (SLOWER, TASK, "AdamW", warm(name="H 5, rate 0.7", lr=0.004), BEST),
    (SLOWER, TASK, "Muon", muon("Muon, H 5"), muon("Muon, dense", lr=0.004)),
    (NO_START, TASK, "Muon", muon("Muon, keep", lr=0.003), muon("Muon, dense", lr=0.004)),
    (EARLIER, TASK, "AdamW", muon("adamw 750: H5 no keep"), BEST),
    (GROWING, TASK, "Muon", muon("Muon, schedule"), muon("Muon, dense", lr=0.004)),
    (LATER, TASK, "Muon", muon("Muon, schedule from 1,100"), muon("Muon, dense", lr=0.004)),
    (NO_START, SOURCES, "Muon", muon("Muon, keep", "sources"), muon("Muon, dense", "sources")),
    ("onebit_adam(start=450)", TASK, "AdamW", muon("onebit, two bits first"), BEST),
    ("onebit_adam(start=450)", SOURCES, "AdamW", muon("onebit, two bits first", "sources"), muon("dense", "sources")),
    *(
        (spec, TINY, name, tiny(spec, name.lower()), tiny("dense", name.lower()))
        for name in ("AdamW", "Muon")
        for spec in ("int8", "int4")
    ),
]


def recorded() -> Iterator[AccuracyRecord]:
    """Records of the specs above. One of int4 is of rows that were partly compiled, and has no selection of them."""
    specs = {spec for spec, *_ in PUBLISHED}
    tasks = {task for _, task, *_ in PUBLISHED}
    found = [one for one in accuracy_records() if one.spec in specs and one.task in tasks]
    return (one for one in found if (one.spec, one.task, one.seeds) != ("int4", TASK, 3))


@pytest.mark.parametrize(("number", "row"), list(enumerate(PUBLISHED)))
def test_a_record_is_what_the_rows_say(number: int, row: tuple[str, str, str, Rows, Rows]) -> None:
    spec, task, optimizer, runs, dense = row
    record = [one for one in recorded() if (one.spec, one.task, one.optimizer) == (spec, task, optimizer)]
    losses, plain = runs.losses(), dense.losses()
    pairs = [(losses[seed][0], plain[seed][0]) for seed in losses]
    difference, mean = fmean(loss - other for loss, other in pairs), fmean(other for _, other in pairs)
    assert all(len(found) == 1 for found in losses.values()), "one run a seed"
    found = [one for one in record if one.seeds == len(pairs) and one.difference == pytest.approx(difference, abs=1e-4)]
    assert len(found) == 1 and found[0].dense == pytest.approx(mean, abs=1e-4)


def test_no_record_of_these_is_without_rows() -> None:
    assert len(list(recorded())) == len(PUBLISHED)


def test_evidence_of_a_frozen_variance_is_that_of_its_start() -> None:
    assert records_of("onebit_adam", "AdamW") == [], "its start of 256 was not trained"
    for start, seeds, lost in ((250, 1, True), (300, 1, False), (450, 4, False)):
        spec = f"onebit_adam(start={start})"
        assert {one.spec for one in records_of(spec, "AdamW")} == {spec}
        assert sum(one.seeds for one in records_of(spec, "AdamW")) == seeds
        assert (free_of_losses([spec], "AdamW") == ()) is lost
    (chosen,) = (spec for spec in weighed("AdamW") if spec.startswith("onebit_adam"))
    assert all(-one.gain < 0.001 for one in records_of(chosen, "AdamW")), (
        "what is advised was trained, and lost nothing"
    )


def test_evidence_is_by_optimizer_and_of_local_steps_without_regard_to_the_start() -> None:
    assert [len(records_of(f"zero_one_adam(start={start})", "adamw")) for start in (215, 150, 256)] == [1, 1, 0]
    assert free_of_losses(["onebit_adam(start=450)", "int4", SPARSE], "AdamW") == ("onebit_adam(start=450)", "int4")
    assert {one.optimizer for one in records_of("int8", "Muon")} == {"Muon"} and free_of_losses(["int8"], "muon")
    assert {one.optimizer for one in records_of("int8", "RMSprop")} == {"AdamW"}
    assert not free_of_losses(["int4"], "Muon") and free_of_losses(["int4"], "AdamW")
    assert {one.task for one in records_of(SPARSE, "adamw")} == {TASK, LARGE}


def test_evidence_is_of_the_same_kind_of_model_where_there_is_some() -> None:
    sparse, short, none = "topk(0.01) | sign", "topk(0.001) | fp16", "powersgd(2)"
    assert in_words(records_of(sparse)) == "trainings of convolutional models with SGD and recurrent models with SGD"
    for kind, task in (("convolutional", "digits, cnn"), ("recurrent", "ptb, lstm")):
        assert {one.task for one in records_of(sparse, "SGD", kind)} == {task}
    assert free_of_losses([sparse, short], "SGD", "convolutional") == (sparse,)
    assert free_of_losses([sparse, short], "SGD", "recurrent") == (short,)
    assert records_of(sparse, "SGD", "transformer") == records_of(sparse, "SGD"), "none were trained with SGD"
    assert records_of(none, "SGD", "recurrent") == records_of(none, "SGD", "") != []


def test_the_optimizer_comes_before_the_kind_of_model() -> None:
    for kind in ("convolutional", "recurrent", "transformer", ""):
        assert {one.optimizer for one in records_of("topk(0.01) | sign", "AdamW", kind)} == {"AdamW"}
        assert {one.optimizer for one in records_of("int4", "Muon", kind)} == {"Muon"}
        assert not free_of_losses(["topk(0.01) | sign", "ef_signsgd"], "AdamW", kind)
    assert {one.optimizer for one in records_of("int4", "RMSprop", "convolutional")} == {"AdamW"}


@pytest.mark.parametrize("task", sorted({one.task for one in accuracy_records()}))
def test_a_record_has_the_kind_of_its_model(task: str) -> None:
    name = task.split(", ")[1].partition(" ")[0]
    facts = {"vocab": 50} if name in ("gpt", "lstm") else {"classes": 10, "channels": 3, "size": 32}
    kind = ModelProfile.of(dict(build(name, {}, facts).named_parameters())).kind
    assert kind and {one.kind for one in accuracy_records() if one.task == task} == {kind}


def test_the_losses_of_rounds_are_those_of_the_optimizer() -> None:
    adamw, muon, tuned = trained("AdamW"), trained("Muon", "transformer"), trained("RMSprop", "recurrent")
    assert [one.spec for one in adamw] == [
        KEPT.format(55),
        SLOWER,
        EARLIER,
        ROUND.format(15, 225),
        ROUND.format(30, 225),
    ]
    assert [-100 * one.gain for one in adamw] == pytest.approx([1.90, 1.97, 2.44, 4.57, 8.53], abs=0.01)
    assert [one.spec for one in muon] == [NO_START, LATER, SLOWER]
    assert [-100 * one.gain for one in muon] == pytest.approx([0.18, 0.47, 2.58], abs=0.01)
    assert tuned == adamw, "no others adapt"
    assert trained("SGD") == trainings("SGD") == [], "none were trained with it"
    assert [one.task for one in trainings("Muon")] == [TASK, TASK, TASK, TASK, SOURCES]


def test_of_rounds_of_one_length_those_with_most_seeds_and_the_better_baseline_tell() -> None:
    for optimizer in ("AdamW", "Muon"):
        for one in trained(optimizer):
            same = [other for other in trainings(optimizer) if lengths(other.spec) == lengths(one.spec)]
            assert one.seeds == max(other.seeds for other in same)
            assert one.dense == min(other.dense for other in same if other.seeds == one.seeds and other.task == TASK)
