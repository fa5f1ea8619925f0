"""Decisions on fixed calibrations: what is advised must follow from figures that a reader can check."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from gradwire.comm.rates import LinkSpec
from gradwire.core.segments import Segments
from gradwire.engine.method import method
from gradwire_lab.cli.advice_text import as_object
from gradwire_lab.cli.local_text import local_table, why_local
from gradwire_lab.perf_model.advice import ERROR, LOSS, advise, break_even, corners
from gradwire_lab.perf_model.calibration import Calibration, CodingCost, load, save
from gradwire_lab.perf_model.candidates import CANDIDATES, arguments, automatic, weighed
from gradwire_lab.perf_model.cluster import Cluster
from gradwire_lab.perf_model.costs import BUCKET_SIZES, Prediction, predict, predict_across
from gradwire_lab.perf_model.local_steps import SPARSE, LocalAdvice, local_choices, local_comparison, to_take, trained
from gradwire_lab.perf_model.model import ModelProfile
from gradwire_lab.perf_model.software import Software
from gradwire_lab.perf_model.training_time import single_steps

MODEL = ModelProfile({"embed": (10_000, 650), "deep": (2600, 1300), "bias": (2600,), "head": (10_000, 650)})
COSTS = {
    "ddp-fp32": CodingCost(0.0, 0.0),
    "ddp-bf16": CodingCost(0.004, 0.004),
    "int8": CodingCost(0.030, 0.050),
    "sign": CodingCost(0.020, 0.030),
    "topk(0.01) | sign": CodingCost(0.040, 0.020),
    "topk(0.001) | sign": CodingCost(0.035, 0.010),
}
FIGURES = Calibration(MODEL, 0.1, 0.2, COSTS, world=4)


def place(link: str, workers: int = 4, per_host: int = 1) -> Cluster:
    return Cluster(workers, LinkSpec.parse(link), per_host)


def test_a_thin_link_wants_compression() -> None:
    found = advise(FIGURES, place("100mbit,5ms"))
    assert found.compresses and found.choice.spec == "topk(0.001) | sign"
    assert found.dense.spec == "ddp-bf16"
    # 16.4 M parameters in bfloat16 around a ring of four: 6/4 x 33 MB at 100 mbit are 3.9 s, and there are headers.
    assert 3.9 < found.dense.seconds < 8
    assert found.speedup == pytest.approx(found.dense.seconds / found.choice.seconds) and found.speedup > 8
    assert [way.seconds for way in found.ways] == sorted(way.seconds for way in found.ways)


def test_a_fast_link_wants_none() -> None:
    found = advise(FIGURES, place("100gbit,10us"))
    assert not found.compresses and found.choice == found.dense
    assert found.speedup == 1.0


def test_dense_is_the_better_of_two() -> None:
    slow_casts = replace(FIGURES, costs={**COSTS, "ddp-bf16": CodingCost(5.0, 5.0)})
    assert advise(slow_casts, place("1gbit")).dense.spec == "ddp-fp32"


def test_what_might_lose_is_only_tempting() -> None:
    """Where dense all but hides behind the backward pass, a way that looks a little faster is not taken."""
    costs = {"ddp-fp32": CodingCost(0.0, 0.0), "ddp-bf16": CodingCost(0.004, 0.004), "sign": CodingCost(0.08, 0.10)}
    figures = replace(FIGURES, costs=costs)
    span = break_even(figures, place("1gbit"), "sign")
    assert span is not None
    near = next(
        there
        for there in (Cluster(4, LinkSpec(span.high * 0.995**i)) for i in range(99))
        if gain(figures, there) > 1.04
    )
    found = advise(figures, near)
    assert not found.compresses
    assert found.uncertain_gain is not None and found.uncertain_gain.spec == "sign"
    assert found.trial == found.uncertain_gain, "who measures may try it"
    assert advise(figures, near, error=0.0).choice.spec == "sign"


def gain(figures: Calibration, cluster: Cluster) -> float:
    return predict(figures, "ddp-bf16", cluster).seconds / predict(figures, "sign", cluster).seconds


def test_what_is_taken_is_safe_in_every_corner() -> None:
    cluster = place("1gbit,1ms")
    found = advise(FIGURES, cluster)
    assert found.compresses
    for truth, there in corners(FIGURES, cluster, ERROR):
        dense = min(predict(truth, spec, there).seconds for spec in ("ddp-fp32", "ddp-bf16"))
        assert predict(truth, found.choice.spec, there).seconds <= (1 + LOSS) * dense


def test_of_equals_the_one_that_loses_least() -> None:
    even = replace(FIGURES, costs={**COSTS, "int8": CodingCost(0.0, 0.0), "topk(0.001) | sign": CodingCost(9.0, 9.0)})
    free = advise(even, place("1tbit"), error=0.0)
    assert free.dense.seconds < 0.31 and not free.compresses
    costs = {"ddp-fp32": CodingCost(0.0, 0.5), "int8": CodingCost(0.001, 0.001), "sign": CodingCost(0.0, 0.001)}
    found = advise(replace(FIGURES, costs=costs), place("100gbit"))
    assert found.ways[0].spec == "sign" and found.choice.spec == "int8"
    assert found.choice.seconds < 1.03 * found.ways[0].seconds


@pytest.mark.parametrize("spec", ["sign", "topk(0.01) | sign"])
def test_break_even_is_where_both_take_as_long(spec: str) -> None:
    cluster = place("100mbit")
    span = break_even(FIGURES, cluster, spec)
    assert span is not None and span.low == 1e3
    for factor, pays in ((0.95, True), (1.05, False)):
        there = replace(cluster, link=LinkSpec(factor * span.high))
        dense = min(predict(FIGURES, each, there).seconds for each in ("ddp-fp32", "ddp-bf16"))
        assert (predict(FIGURES, spec, there).seconds < dense) is pays


def test_a_spec_that_never_pays_has_no_break_even() -> None:
    cluster = place("100mbit")
    never = replace(FIGURES, costs={**COSTS, "sign": CodingCost(1e9, 1e9)})
    assert break_even(never, cluster, "sign") is None


def test_where_both_are_hidden_rounding_does_not_pay() -> None:
    """Sums of the same parts in another order differ by a bit; what a thin link gains must not be lost in that."""

    def predicted(_: Calibration, spec: str, there: Cluster) -> Prediction:
        rate = there.link.rate_bits or 1e13
        seconds = max(0.3, 1e6 / rate) if spec == "sign" else max(0.3 * (1 + 1e-15), 3e7 / rate)
        return cast(Prediction, SimpleNamespace(seconds=seconds))

    span = break_even(FIGURES, place("10gbit"), "sign", predicted)
    assert span is not None and span.low == 1e3 and 0.98e8 < span.high < 1.02e8


def test_few_hops_may_pay_on_fast_links_alone() -> None:
    """A gather to very many is long, but has half of the hops of a sum: it pays where only the delay counts."""
    far, many = (
        place("10gbit,20ms", 512),
        replace(FIGURES, costs={"ddp-fp32": CodingCost(0.0, 0.0), "topk(0.01)": CodingCost(0, 0)}),
    )
    span = break_even(many, far, "topk(0.01)")
    assert span is not None and span.high == 1e13 and 1e6 < span.low < 10e9
    for factor, pays in ((1.05, True), (0.95, False)):
        there = replace(far, link=replace(far.link, rate_bits=factor * span.low))
        assert (predict(many, "topk(0.01)", there).seconds < predict(many, "ddp-fp32", there).seconds) is pays


def test_gradients_of_two_bytes_are_half_as_long() -> None:
    short = replace(FIGURES, model=replace(MODEL, dtype="bfloat16"))
    whole, half = (predict(figures, "ddp-fp32", place("100mbit")) for figures in (FIGURES, short))
    assert half.sent == whole.sent / 2 and half.seconds < 0.6 * whole.seconds
    assert predict(short, "ddp-bf16", place("100mbit")).sent == half.sent, "a hook has nothing to shorten"
    assert {way.spec for way in advise(short, place("100mbit")).ways} == set(COSTS) - {"ddp-bf16"}
    assert predict(short, "sign", place("100mbit")).sent == predict(FIGURES, "sign", place("100mbit")).sent
    parameters = {"big": torch.zeros(9, dtype=torch.bfloat16), "small": torch.zeros(3)}
    assert (
        ModelProfile.of(parameters).dtype == "bfloat16" and ModelProfile.of(parameters).called("ddp-fp32") == "ddp-bf16"
    )


def test_one_size_of_launches_is_no_choice() -> None:
    """`auto` cannot change the size, so it must not hope for another one."""
    starts = replace(FIGURES, costs={**COSTS, "sign": CodingCost(0.02, 0.03, start=0.2)})
    free, bound = (
        predict(starts, "sign", place("1gbit")),
        predict(starts, "sign", place("1gbit"), True, (BUCKET_SIZES[0],)),
    )
    assert (
        free.bucket_bytes == BUCKET_SIZES[1] and bound.bucket_bytes == BUCKET_SIZES[0] and bound.seconds > free.seconds
    )


def test_bytes_of_a_gather_grow_with_the_world_and_of_sums_do_not() -> None:
    few, many = place("100mbit", 4), place("100mbit", 64)
    gathered, summed = "topk(0.01) | sign", "sign"
    assert predict(FIGURES, gathered, many).sent > 15 * predict(FIGURES, gathered, few).sent
    assert predict(FIGURES, summed, many).sent < 1.4 * predict(FIGURES, summed, few).sent


@pytest.mark.parametrize("spec", ["ddp-bf16", "topk(0.01) | sign"])
def test_hosts_exchange_less_than_their_workers_would(spec: str) -> None:
    cluster = place("1gbit", 32, 8)
    assert predict_across(FIGURES, spec, cluster).seconds < predict(FIGURES, spec, cluster).seconds


def test_hosts_of_one_worker_are_workers() -> None:
    alone = place("1gbit", 4, 1)
    assert predict_across(FIGURES, "sign", alone).seconds == pytest.approx(predict(FIGURES, "sign", alone).seconds)


def test_software_counts_where_no_link_hinders() -> None:
    slow = Software({"all_reduce": 0.01}, {"all_reduce": 1e-8}, 4)
    cluster = place("unshaped")
    free, paid = (predict(replace(FIGURES, software=s), "ddp-fp32", cluster).seconds for s in (Software(), slow))
    assert free == pytest.approx(FIGURES.compute)
    # 65.6 MB, 6/4 of that sent, 10 ns each: 0.98 s beside 0.2 s of backward pass on the same core.
    assert paid == pytest.approx(0.3 + 0.984 + 3 * 0.01, rel=0.05)


ROUNDS = replace(FIGURES, costs={**COSTS, "int4": CodingCost(0.03, 0.05), SPARSE: CodingCost(0.06, 0.03)})


def local_steps(
    figures: Calibration, there: Cluster, optimizer: str = "AdamW", max_loss: float = 0.02
) -> LocalAdvice | None:
    """The rounds to take, however long single steps take."""
    choices = local_choices(figures, there, optimizer=optimizer) or ()
    return to_take(choices, math.inf, max_loss)


def test_the_fastest_rounds_that_were_trained_are_advised() -> None:
    thin, fast = (local_steps(ROUNDS, place(link)) for link in ("1mbit,20ms", "100gbit,10us"))
    assert thin is not None and fast is not None
    assert thin.spec == "sparseloco(H=1, keep=1.0, start=55, scales='bf16')", "other starts take longer there"
    assert fast.spec == "sparseloco(H=5, rate=0.7, start=225, scales='bf16')", "its rounds have less to encode"
    given = eval(fast.call, {"gradwire": SimpleNamespace(local=lambda *a: a), "model": 0, "optimizer": 1})
    assert given == (0, 1, fast.spec) and fast.H == 5
    easy = replace(ROUNDS, costs={**ROUNDS.costs, SPARSE: CodingCost(0.001, 0.001)})
    assert local_steps(easy, place("100gbit,10us")).spec == trained("AdamW")[0].spec  # type: ignore[union-attr]
    assert local_steps(replace(ROUNDS, costs={"sign": COSTS["sign"]}), place("1mbit")) is None
    assert local_steps(ROUNDS, place("1mbit"), optimizer="SGD") is None, "none were trained with it"
    assert local_steps(ROUNDS, place("1mbit"), optimizer="Muon") is not None
    across = local_steps(easy, place("100gbit,10us", 8, 2))
    assert across is not None and "keep" not in across.spec and across.call.endswith('across="hosts")')


@pytest.mark.parametrize(
    ("link", "max_loss", "H"),
    [("1mbit", 0.01, 1), ("1mbit", 0.02, 1), ("1mbit", 0.03, 5), ("1gbit", 0.02, 5), ("1gbit", 0.1, 5)],
)
def test_of_equally_fast_rounds_those_that_lose_least_are_advised(link: str, max_loss: float, H: int) -> None:
    found = local_steps(ROUNDS, place(link), max_loss=max_loss)
    assert found is not None and found.H == H


@pytest.mark.parametrize("speed", [0.7, 1.0, 1.4])
def test_the_rounds_that_are_advised_do_not_follow_noise(speed: float) -> None:
    found = local_steps(ROUNDS.scaled(speed, 1 / speed), place("10mbit,20ms"))
    assert found is not None and found.H == 1


def test_rounds_of_several_lengths_are_shown_beside_the_one_to_take() -> None:
    thin = place("1mbit,20ms")
    advice = advise(ROUNDS, thin, ("int8", "int4"))
    single = single_steps(ROUNDS, thin, advice.choice, "AdamW")
    found = local_comparison(ROUNDS, thin, single, max_loss=0.02)
    assert found is not None
    choices, chosen = found.choices, found.chosen
    assert chosen is not None and [one.H for one in choices] == [1, 5, 5, 15, 30] and chosen == choices[0]
    whole = predict(ROUNDS, SPARSE, thin)
    for one in choices:
        assert one.seconds - ROUNDS.compute == pytest.approx((whole.seconds - ROUNDS.compute) / one.H)
        assert one.sent == pytest.approx(whole.sent / one.H)
    assert [one.spec for one in choices] == [one.spec for one in trained("AdamW")]
    assert predict(ROUNDS, SPARSE, thin, overlaps=True).seconds == predict(ROUNDS, SPARSE, thin, overlaps=False).seconds
    told = as_object(ROUNDS, thin, advice, ("", None), found)["local_steps"]
    assert told["H"] == 1 and [one["H"] for one in told["choices"]] == [one.H for one in choices]
    none = as_object(ROUNDS, thin, advice, ("", None), replace(found, chosen=None))["local_steps"]
    assert none["H"] is None and none["choices"] == told["choices"] and none["every_step"] == told["every_step"]
    why = why_local(ROUNDS, found)
    assert "H = 1 is the fastest" in why and "at most 2 % more than dense" in why
    assert "H = 1, then 5 from step 750 would take" in why and "but lose 2.4 %" in why
    table = local_table(ROUNDS, found)(80)
    assert [cell for cell in table.columns[0].cells if "*" in str(cell)] == [f"{chosen.H} *"]
    assert list(table.columns[1].cells) == ["", "55", "225", "", "225", "225"], "a start explains a total"
    assert list(table.columns[-2].cells) == ["0.71 %", "1.9 %", "2 %", "2.4 %", "4.6 %", "8.5 %"]
    assert "H = 15 and 30: dense had the same short warm-up" in str(table.caption) and "gpt of 114 M" in str(
        table.caption
    )


def test_the_message_of_a_round_is_its_own() -> None:
    """64 of 4,096 entries, a bit each, and a scale of two bytes; positions of 7 to 12 bits; 1-D tensors are whole."""
    world = 4
    sent = predict(ROUNDS, SPARSE, place("1gbit", world)).sent
    chunks = (2 * 6_500_000 + 2600 * 1300) / 4096
    least, most = (chunks * 64 * (1 + bits) / 8 + 2 * chunks for bits in (7, 12))
    bundle = 2 * 2600 * 2 * (world - 1) / world
    assert (world - 1) * least < sent - bundle < (world - 1) * most
    longer = predict(replace(ROUNDS, costs={"sparseloco(H=7)": CodingCost(0, 0)}), "sparseloco(H=7)", place("1gbit"))
    assert 6 * longer.sent < sent < 7 * longer.sent, "scales of four bytes"


def test_calibrations_are_kept_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    short = replace(MODEL, dtype="float16")
    save(replace(FIGURES, software=Software({"all_gather": 0.5}, {}, 4), note="by hand", model=short), path)
    read = load(path)
    assert read.model.dtype == "float16"
    assert (read.forward, read.costs, read.software.latency, read.note) == (0.1, COSTS, {"all_gather": 0.5}, "by hand")
    assert predict(read, "sign", place("1gbit")) == predict(
        replace(FIGURES, software=read.software), "sign", place("1gbit")
    )
    for text in ("", "{}", '{"model": 3}'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"figures\.json holds no calibration"):
            load(path)
    with pytest.raises(ValueError, match="there is no calibration"):
        load(tmp_path / "absent.json")


def test_refusals_are_sentences() -> None:
    with pytest.raises(ValueError, match="hosts of 3"):
        place("1gbit", 8, 3)
    with pytest.raises(ValueError, match="0 workers"):
        place("1gbit", 0)
    with pytest.raises(ValueError, match="'int2' was not calibrated; measured are ddp-fp32"):
        predict(FIGURES, "int2", place("1gbit"))
    with pytest.raises(ValueError, match=r"none of int2, onebit was calibrated; measured are ddp-fp32"):
        advise(FIGURES, place("1gbit"), ("int2", "onebit"))
    for link in ("1gbit,20ms,5ms", "1gbit,1%"):
        with pytest.raises(ValueError, match="has jitter or loss too; leave them out"):
            place(link)
    with pytest.raises(ValueError, match="gradients in int8"):
        replace(MODEL, dtype="int8")
    with pytest.raises(ValueError, match="cannot read the option 'depth=3'"):
        arguments("int4; depth=3")


@pytest.mark.parametrize("spec", CANDIDATES)
def test_a_candidate_compresses(spec: str) -> None:
    text, options = arguments(spec)
    dense, whole, units = method("fp32"), method(text, **options), Segments(("a",), ((300, 400),))  # type: ignore[arg-type]
    sent = [each.exchange.traffic(each.table[-1][1], units, 4) for each in (whole, dense)]
    assert sent[0] < sent[1] / 2


def test_candidates_and_their_options_are_read() -> None:
    assert set(automatic()) == set(CANDIDATES) - {"dgc(0.001)", "onebit_adam(start=450)"}
    assert (
        {"onebit_adam(start=450)"}
        == {*weighed("AdamW")} - {*weighed("sgd")}
        == {*weighed("adamw")} - {*weighed("Muon")}
    )
    assert weighed("adamw", across=True) == weighed("sgd"), "hosts of several workers cannot"
    assert arguments("topk(0.001) | fp16; bundle=none; exchange=allgather") == (
        "topk(0.001) | fp16",
        {"bundle": None, "exchange": "allgather"},
    )
