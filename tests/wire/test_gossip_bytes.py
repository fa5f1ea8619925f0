"""Gossip, counted by the kernel: what each rank's interface sends is what `net.report()` says, for every method.

Each rank lives in a network namespace of its own. The framing model is that of `test_captured_bytes`, with one message
of gloo's for each letter: ``tx_bytes = sent + 144 * messages + 1448 * resent + 66 * tx_packets``.
"""

import tempfile
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from tests.wire.test_captured_bytes import MESSAGE, MESSAGES
from torch import nn

import gradwire
from gradwire.core.registry import registered
from gradwire.integrations.gossip.report import GossipReport
from namespaces import SEGMENT, Counters, Unavailable, enter, meet, namespaces, read
from spawn import COLLECTIVE_TIMEOUT, run_ranks

WORLD = 4


class Case(NamedTuple):
    """A spec, its codec, and steps enough for a good part of a megabyte; how many messages of gloo's a step has."""

    spec: str
    codec: str | None
    steps: int
    messages: float = 2  # one to each neighbor on the ring


CASES = {
    "centralized": Case("centralized", "fp16", 1, MESSAGES["allreduce"] * (WORLD - 1)),
    "choco": Case("choco(ring)", "sign", 12),  # beyond a window of gamma=auto
    "dcd": Case("dcd(ring)", "qsgd", 2),
    "deepsqueeze": Case("deepsqueeze(ring)", "topk(0.05) | int32", 4),
    "dpsgd": Case("dpsgd(ring)", "fp16", 1),
    "ecd": Case("ecd(ring)", "natural", 2),
    "local_gossip": Case("local_gossip(dpsgd(ring), H=3)", "fp16", 3, 2 / 3),
    "noloco": Case("noloco(ring)", "fp16", 1),
    "powergossip": Case("powergossip(ring, iterations=2)", None, 30, 4),  # two letters to each
    "sgp": Case("sgp(ring)", "bf16", 1),
}


class Account(NamedTuple):
    report: GossipReport
    counted: Counters


def watch(rank: int, world: int, folder: str, names: list[str]) -> dict[str, Account]:
    """Gossip by every method, in the namespace that bears my name."""
    store = dist.FileStore(f"{folder}/meeting", world)  # a file, so that rendezvous stays off the interfaces
    meet(store, world, "begun")
    dist.destroy_process_group()
    enter(names[rank])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=COLLECTIVE_TIMEOUT)
    return {name: account(name, case, rank, store) for name, case in CASES.items()}


def account(name: str, case: Case, rank: int, store: Any) -> Account:
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    net = gradwire.gossip(model, case.spec, case.codec)
    draw = torch.Generator().manual_seed(rank)
    meet(store, WORLD, f"{name}, begun")
    before = read()
    meet(store, WORLD, f"{name}, read")
    for _ in range(case.steps):
        with torch.no_grad():
            for p in model.parameters():
                p += 0.01 * torch.randn(p.shape, generator=draw)
        net()
    meet(store, WORLD, f"{name}, ended")
    counted = read().since(before)
    meet(store, WORLD, f"{name}, counted")
    return Account(net.report(), counted)


def test_every_method_is_counted() -> None:
    assert CASES.keys() == registered("gossip").keys()


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Account]]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        try:
            names = stack.enter_context(namespaces(WORLD))
        except Unavailable as reason:
            pytest.skip(str(reason))
        return run_ranks(watch, WORLD, folder, names)


@pytest.mark.parametrize("name", CASES)
def test_the_report_equals_the_bytes_that_the_kernel_sent(name: str, ranks: list[dict[str, Account]]) -> None:
    case = CASES[name]
    for accounts in ranks:
        report, counted = accounts[name]
        expected = report.sent + MESSAGE * case.messages * case.steps
        error = (counted.data - expected) / report.sent
        print(f"{name:11} {report.sent:9.0f} {counted.sent:9} {counted.sent_frames:5} {error:+.2%}")
        assert report.steps == case.steps and report.sent > 3e5
        assert counted.carried(expected, rel=0.01), (counted, expected)
        assert counted.sent_frames >= 0.97 * report.sent / SEGMENT
