"""What the accuracy records say of a GPT is what the published rows say."""

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import pytest

from gradwire_lab.perf_model.accuracy_records import AccuracyRecord, accuracy_records, free_of_losses, records_of
from gradwire_lab.perf_model.candidates import SPARSE
from gradwire_lab.perf_model.local_steps import TASK, TRAINED, elsewhere, expected_loss

RESULTS = Path(__file__).parents[2] / "docs" / "results"
SOURCES = "Python sources, gpt of 10.9 M"
LARGE, TINY = "WikiText-2 as bytes, gpt of 114 M", "WikiText-2 as bytes, gpt of 0.13 M"
ROUND = "sparseloco(H={}, start={}, scales='bf16')"
KEPT = "sparseloco(H=1, keep=1.0, start={}, scales='bf16')"
SLOWER = "sparseloco(H=5, rate=0.7, start=225, scales='bf16')"
NO_START = "sparseloco(H=1, keep=1.0, scales='bf16')"
GROWING = f"local_schedule({{0: {NO_START}, 1000: sparseloco(H=5, rate=0.7, scales='bf16')}})"


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
    (GROWING, TASK, "Muon", muon("Muon, schedule"), muon("Muon, dense", lr=0.004)),
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


def test_evidence_is_by_optimizer_and_without_regard_to_the_start() -> None:
    assert {one.spec for one in records_of("onebit_adam", "adamw")} == {f"onebit_adam(start={n})" for n in (250, 450)}
    assert len(records_of("zero_one_adam", "adamw")) == 2
    assert free_of_losses(["onebit_adam", "zero_one_adam", SPARSE], "AdamW") == ("onebit_adam",)
    assert {one.optimizer for one in records_of("int8", "Muon")} == {"Muon"} and free_of_losses(["int8"], "muon")
    assert {one.optimizer for one in records_of("int8", "RMSprop")} == {"AdamW"}
    assert not free_of_losses(["int4"], "Muon") and free_of_losses(["int4"], "AdamW")
    assert {one.task for one in records_of(SPARSE, "adamw")} == {TASK, LARGE}
    assert [one.optimizer for one in elsewhere("Muon")] == ["AdamW", "AdamW", *["Muon"] * 4]
    assert [one.optimizer for one in elsewhere("AdamW")] == ["AdamW", "AdamW"]


def test_losses_are_those_of_rounds_of_the_same_length() -> None:
    every, longest = (expected_loss(ROUND.format(H, 256)) for H in (5, 30))
    assert every is not None and longest is not None
    assert every.increase == pytest.approx(0.0134, abs=1e-4) and every.evidence[0].seeds == 3
    assert "about 8.5 %" in str(longest) and longest.evidence[0].seeds == 1
    assert expected_loss(ROUND.format(8, 256)) is None and expected_loss(ROUND.format(100, 256)) is None
    kept = expected_loss(SPARSE)
    assert kept is not None and kept.increase == pytest.approx(0.0190, abs=1e-4)
    assert expected_loss("local_sgd(H=5)") is None and expected_loss("diloco(H=5)") is None
    assert expected_loss("diloco(H=30)").increase == pytest.approx(0.0905, abs=1e-4)  # type: ignore[union-attr]


def test_the_rounds_that_are_advised_were_trained_as_they_are() -> None:
    losses = []
    for spec in TRAINED:
        found = expected_loss(spec)
        assert found is not None and [one.spec for one in found.evidence] == [spec]
        losses.append(found.increase)
    assert losses == sorted(losses) and losses[1] == pytest.approx(0.0197, abs=1e-4), "longer ones lose more"
