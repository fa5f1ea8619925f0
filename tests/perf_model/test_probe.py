"""A probe finds what the link is, the same on all ranks, or says in time that it cannot."""

import os
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire.comm.alphabeta import seconds
from gradwire.comm.backend import CountingBackend
from gradwire.comm.collectives import AllReduceOp, Collective
from gradwire.comm.emulated import EmulatedBackend
from gradwire.comm.rates import LinkSpec
from gradwire.comm.torch_backend import connect
from gradwire_lab.perf_model.probe import measured_link, probe
from gradwire_lab.perf_model.software import measure
from spawn import run_ranks


class Exact(CountingBackend):
    """A link on which everything takes just as long as the table says, on a clock of its own."""

    def __init__(self, world: int, spec: str) -> None:
        super().__init__()
        self.rank, self.world, self.device = 0, world, torch.device("cpu")
        self.spec, self.now = LinkSpec.parse(spec), 0.0

    def move(self, collective: Collective, out: Tensor | None = None) -> Tensor:
        x = collective.tensor
        assert isinstance(collective, AllReduceOp)
        self.now += seconds("all_reduce", x.numel() * x.element_size(), self.world, self.spec)
        return x if out is None else out.copy_(x)


@pytest.mark.parametrize("world", [2, 8])
@pytest.mark.parametrize("text", ["20mbit,5ms", "100mbit", "10gbit,50us", "1gbit,20ms"])
def test_a_link_as_in_the_table_is_found(world: int, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers, hops and announcements are in the table, so they must not be counted again."""
    link = Exact(world, text)
    monkeypatch.setattr("time.perf_counter", lambda: link.now)
    rate, delay = measured_link(link).rate_bits, measured_link(link).delay_seconds
    assert rate == pytest.approx(link.spec.rate_bits, rel=0.03)
    assert delay == pytest.approx(link.spec.delay_seconds, rel=0.01, abs=2e-6)


def probed(rank: int, world: int) -> list[tuple[LinkSpec, LinkSpec]]:
    """Several times, for others may use this machine; the ranks stop together, since they measure the same."""
    found: list[tuple[LinkSpec, LinkSpec]] = []
    os.environ.pop("GRADWIRE_LINK", None)
    while len(found) < 10 and not (found and is_right(*found[-1])):
        found.append((measured_link(EmulatedBackend(connect(), "20mbit,5ms")), probe(60.0)))
    return found


def is_right(thin: LinkSpec, fast: LinkSpec) -> bool:
    assert thin.rate_bits is not None and fast.rate_bits is not None
    right = 17e6 < thin.rate_bits < 22e6 and 0.004 < thin.delay_seconds < 0.008
    return right and fast.rate_bits > 5 * thin.rate_bits


def test_an_emulated_link_is_measured() -> None:
    one, two = run_ranks(probed, 2)
    assert one == two and is_right(*one[-1]), one


def left_alone(rank: int, world: int) -> Any:
    store = torch.distributed.distributed_c10d._get_default_store()
    if rank:
        store.wait(["told"], timedelta(seconds=60))
        return None
    began = time.monotonic()
    try:
        probe(timeout_seconds=1.5)
    except ValueError as wrong:
        took = time.monotonic() - began
        store.set("told", "")
        return str(wrong), took


def test_a_silent_rank_is_told_in_a_sentence() -> None:
    (said, took), _ = run_ranks(left_alone, 2)
    assert "within 1.5 s" in said and "100mbit,20ms" in said
    assert took < 10, "a probe waits that long unless it is told otherwise"


def timed(rank: int, world: int) -> Any:
    software = measure(connect(), torch.distributed.barrier)
    return software.latency, software.per_byte


def test_software_costs_are_the_same_figures_everywhere() -> None:
    one, two = run_ranks(timed, 2)
    assert one == two
    assert set(one[0]) == {"all_reduce", "all_gather", "all_to_all"}
    assert all(seconds > 0 for seconds in one[0].values())
