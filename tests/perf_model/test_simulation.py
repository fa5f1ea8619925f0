"""The inverted grid: decided on wrong figures, scored on true ones; and what else a simulation must get right."""

import json
import math
import random
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gradwire.comm.alphabeta import seconds
from gradwire_lab.cli.main import app
from gradwire_lab.cli.simulate import _several
from gradwire_lab.cli.simulated_models import simulated_models
from gradwire_lab.perf_model import h200
from gradwire_lab.perf_model.advice import advise, known, scaled
from gradwire_lab.perf_model.calibration import Calibration, CodingCost, save
from gradwire_lab.perf_model.candidates import CANDIDATES
from gradwire_lab.perf_model.cluster import Cluster
from gradwire_lab.perf_model.costs import predict
from gradwire_lab.perf_model.model import DENSE
from gradwire_lab.perf_model.simulation import (
    CHOOSABLE,
    GOSSIPED,
    INSIDE,
    NEIGHBORS,
    SimulatedModel,
    SimulationPoint,
    grid,
    judge,
    settled_spec,
)
from gradwire_lab.perf_model.stragglers import Stragglers

MANY_EXPOSED = 0.25  # share of a dense step that is exposed communication, from which compression ought to pay
GAIN = 1.2  # by how much, there


@dataclass(frozen=True)
class ScoredDecision:
    """A decision on wrong figures, and what came of it on the true ones; speed-ups are over overlapped bfloat16 DDP.

    Attributes:
        cell: Where.
        choice: What `auto` stays with.
        speedup: By that.
        advised: By what was advised, with no trial to correct it.
        exposed: Communication that bfloat16 DDP waits for, as a share of its step.
    """

    cell: SimulationPoint
    choice: str
    speedup: float
    advised: float
    exposed: float

    @property
    def loses(self) -> bool:
        """More than two percent slower than not compressing, for someone who trusts the advice or for `auto`."""
        return min(self.speedup, self.advised) < 1 / 1.02

    @property
    def misses(self) -> bool:
        """Much to gain, and not gained."""
        return self.exposed > MANY_EXPOSED and self.speedup < GAIN


def inverted(cell: SimulationPoint, error: float, draw: random.Random) -> ScoredDecision:
    """Decide on figures that are off by ``error``, each of them up or down by itself, and score on the true ones."""
    truth = cell.model_run.calibrated(cell.parties, CHOOSABLE)
    found = advise(*mistaken(cell, truth, error, draw), CHOOSABLE, cell.predictor)
    choice = settled_spec(cell, truth, found)
    bf16, taken, advised = (
        cell.predictor(truth, spec, cell.cluster) for spec in ("ddp-bf16", choice, found.choice.spec)
    )
    exposed = bf16.split.exposed / bf16.seconds
    return ScoredDecision(cell, choice, bf16.seconds / taken.seconds, bf16.seconds / advised.seconds, exposed)


def mistaken(
    cell: SimulationPoint, truth: Calibration, error: float, draw: random.Random
) -> tuple[Calibration, Cluster]:
    def off() -> float:
        return 1 + draw.choice((-1, 1)) * error

    seen = replace(truth.scaled(off()), costs={spec: cost.scaled(off()) for spec, cost in truth.costs.items()})
    return seen, replace(cell.cluster, link=scaled(cell.cluster.link, off(), off()))


def best_possible(cell: SimulationPoint) -> float:
    """The largest gain over bfloat16 DDP that any candidate has, on true figures."""
    truth = cell.model_run.calibrated(cell.parties, CHOOSABLE)
    bf16 = cell.predictor(truth, "ddp-bf16", cell.cluster).seconds
    ways = known(truth, (*DENSE, *CHOOSABLE))
    return bf16 / min((cell.predictor(truth, spec, cell.cluster).seconds for spec in ways), default=math.inf)


def decided(cells: list[SimulationPoint], seed: int) -> list[ScoredDecision]:
    draw = random.Random(seed)
    return [inverted(cell, 0.15, draw) for cell in cells]


def check(verdicts: list[ScoredDecision]) -> None:
    for verdict in verdicts:
        if verdict.misses:
            print(f"{verdict.cell}: {verdict.choice}, {verdict.speedup:.3f}, at best {best_possible(verdict.cell):.3f}")
    assert not [str(verdict.cell) for verdict in verdicts if verdict.loses]
    assert not [str(verdict.cell) for verdict in verdicts if verdict.misses]


def test_auto_never_loses_and_gains_where_there_is_much_to_gain() -> None:
    """Every figure is 15 % too high or too low; 200 cells."""
    cells = list(grid(simulated_models()))
    assert len(cells) == 200
    verdicts = decided(cells, seed=0)
    check(verdicts)
    much = [verdict for verdict in verdicts if verdict.exposed > 0.25]
    assert len(much) > 100 and not any(verdict.misses for verdict in much)
    assert min(verdict.advised for verdict in verdicts) > 0.98, "nor does advice lose that nobody puts on trial"
    assert any(verdict.choice.startswith("ddp-") for verdict in verdicts), "somewhere, dense must be the answer"


@pytest.mark.study
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(5))
def test_the_same_with_other_errors_and_hierarchically(seed: int) -> None:
    check(decided(list(grid(simulated_models())), seed))
    check(decided(list(grid(simulated_models(), workers=(16, 64, 512, 4096), per_host=8)), seed))


def test_neighbors_pay_for_what_they_tell() -> None:
    """Gossip is compute, coding and wire, each of them."""
    for cell in grid([simulated_models()[0]], [8], ["100mbit,5ms", "400gbit,5us"]):
        row, coding = judge(cell), h200.cost(cell.model_run.model, GOSSIPED, NEIGHBORS + 1)
        nbytes = NEIGHBORS * cell.model_run.model.elements / 8  # a sign is a bit
        wire = seconds("swap", nbytes, NEIGHBORS + 1, cell.cluster.link)
        assert coding.start > 0 and coding.encode > 0 and coding.decode > 0
        whole = row["compute_seconds"] + coding.start + coding.encode + coding.decode + wire
        assert row["gossip_seconds"] == pytest.approx(whole, rel=0.01)


def test_a_row_tells_of_every_way() -> None:
    (cell,) = grid([simulated_models()[0]], [64], ["1gbit,500us"])
    row = judge(cell)
    assert set(row["ways"]) == {"ddp-fp32", "ddp-bf16", *CHOOSABLE}
    assert row["assumed"] is (row["choice"] in ("int8", "powersgd(4)", "powersgd(2)"))
    assert row["ways"][row["choice"]] == pytest.approx(row["seconds"], rel=1e-4)
    assert row["ways"][row["fastest_compressed"]] == min(row["ways"][spec] for spec in CHOOSABLE)


def test_what_was_measured_by_other_specs_is_weighed(tmp_path: Path) -> None:
    """A calibration of one spec is simulated with that alone; one of none that may be chosen is refused."""
    model, dense = simulated_models()[0].model, {"ddp-fp32": CodingCost(0.0, 0.0), "ddp-bf16": CodingCost(0.0, 0.0)}
    one, none = (Calibration(model, 0.1, 0.2, {**dense, spec: CodingCost(0.01, 0.01)}) for spec in ("int4", "onebit"))
    (cell,) = grid([SimulatedModel("mine", "as measured", model, 0.3, measured=one)], [8], ["1gbit"])
    row = judge(cell)
    assert set(row["ways"]) == {*dense, "int4"} and row["gossip_seconds"] is None
    save(none, tmp_path / "figures.json")
    done = CliRunner().invoke(app, ["simulate", "--calibration", str(tmp_path / "figures.json")])
    assert done.exit_code == 2 and "none of int8, int4" in done.output and "measured are ddp-fp32" in done.output
    save(replace(one, note="timed by hand"), tmp_path / "figures.json")
    page, options = tmp_path / "x.html", ["--workers", "8", "--link", "1gbit", "--per-host", "1"]
    words = ["-o", str(page), "--rows", str(tmp_path / "x.jsonl"), *options]
    done = CliRunner().invoke(app, ["simulate", "--calibration", str(tmp_path / "figures.json"), *words])
    assert done.exit_code == 0 and "Computing and compressing: timed by hand." in page.read_text()
    assert "H200" not in page.read_text(), "nothing was assumed"


def test_hierarchical_grids_have_hosts_to_talk_to(capsys: pytest.CaptureFixture[str]) -> None:
    assert _several([8, 16, 64], 8) == [16, 64], "each number once"
    assert "8 workers are not two hosts of 8; the hierarchical grid begins at 16" in capsys.readouterr().err
    assert _several([16, 64], 8) == [16, 64] and not capsys.readouterr().err


def test_more_workers_make_gathers_lose() -> None:
    spec = "topk(0.01) | sign"
    small, large = (next(grid([simulated_models()[0]], [workers], ["1gbit,500us"])) for workers in (8, 4096))
    seconds = [predict(cell.model_run.calibrated(cell.parties), spec, cell.cluster).seconds for cell in (small, large)]
    assert seconds[1] > 50 * seconds[0]
    assert judge(small)["speedup"] > 5 and not judge(large)["choice"].startswith("topk")


def test_a_slow_link_inside_hosts_is_felt() -> None:
    steps = []
    for inside in (INSIDE, "10gbit,20us"):
        (cell,) = grid(simulated_models()[:1], [64], ["1gbit,500us"], 8, inside=inside)
        steps.append(judge(cell)["ways"]["int4"])
    assert steps[0] < steps[1]


def test_trees_beat_rings_where_there_are_many_workers() -> None:
    (ring,), (tree,), (best,) = (
        [judge(cell) for cell in grid([simulated_models()[0]], [4096], ["10mbit,20ms"], algorithm=way)]
        for way in ("ring", "tree", "best")
    )
    assert ring["ddp_bf16_seconds"] > tree["ddp_bf16_seconds"] >= best["ddp_bf16_seconds"]


def test_kernels_of_an_h200_are_the_published_ones() -> None:
    model = simulated_models()[0].model  # ResNet-50
    assert model.elements == 25_557_032
    dgc = h200.cost(model, "dgc(0.001)", 8)
    start, slope = h200.lines()["dgc"]
    for row in h200.rows():
        if row["kernel"] == "dgc":
            assert 1e3 * (start + slope * row["n"]) == pytest.approx(row["ms"], rel=0.3)
    assert dgc.encode > slope * 25e6 and dgc.start >= start
    assert all(h200.cost(model, spec, 8).encode >= 0 for spec in CANDIDATES)
    assert h200.cost(model, "topk(0.01) | sign", 64).decode > 7 * h200.cost(model, "topk(0.01) | sign", 8).decode


def test_everybody_waits_for_the_slowest_but_neighbors_less() -> None:
    even, uneven = Stragglers(), Stragglers(jitter=0.05, share=0.01, slowdown=3)
    assert even.together(512) == even.in_a_ring(512) == 1.0
    assert uneven.together(8) < uneven.together(512) <= 3.6
    assert 1.0 < uneven.in_a_ring(512) < uneven.together(512)
    for wrong in ({"jitter": 1.5}, {"share": -0.1}, {"slowdown": 0.5}):
        with pytest.raises(ValueError, match="give shares"):
            Stragglers(**wrong)


def test_the_command_writes_a_page_and_rows(tmp_path: Path) -> None:
    page, rows = tmp_path / "grid.html", tmp_path / "grid.jsonl"
    options = ["--workers", "8", "--link", "100mbit,5ms", "--link", "400gbit,5us", "--per-host", "1"]
    done = CliRunner().invoke(app, ["simulate", "-o", str(page), "--rows", str(rows), *options])
    assert done.exit_code == 0, done.output
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert len(found) == 20 and {row["place"] for row in found} == {"flat"}
    lost = [row for row in found if row["compression_loses"]]
    assert lost and all(row["choice"].startswith("ddp-") for row in lost)
    text = page.read_text()
    assert "http://" not in text.split("<script>")[0] and "ResNet-50, 32 images" in text and "dense" in text
    assert "Accuracy is not in these figures" in text and "times faster than bfloat16 DDP" in text


def test_refusals_are_sentences(tmp_path: Path) -> None:
    for options, words in (
        (["--link", "9parsec"], "no unit of rate"),
        (["--algorithm", "star"], "take ring, tree or best"),
        (["--calibration", str(tmp_path / "none.json")], "there is no calibration"),
        (["--jitter", "2"], "give shares"),
        (["--link", "1gbit,5ms,1ms"], "has jitter or loss too"),
        (["--rows", str(tmp_path)], "is a folder; name a file"),
        (["--inside", "9parsec"], "no unit of rate"),
    ):
        done = CliRunner().invoke(app, ["simulate", *options, "-o", str(tmp_path / "x.html")])
        assert done.exit_code == 2 and words in done.output, done.output
