"""The bytes that `traffic` counts for a collective are those that the kernel counts under gloo."""

import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradwire.comm import TorchBackend
from gradwire.comm.collectives import AllGatherOp, AllReduceOp, AllToAllOp, BroadcastOp, Collective
from namespaces import FRAME, SEGMENT, Counters, Unavailable, enter, meet, namespaces, read
from spawn import COLLECTIVE_TIMEOUT, run_ranks

BYTES = 1_200_004  # a multiple of 4, but not of 3 ranks
SPLITS = (200_000, 1, 1_000_003)


def collectives(rank: int) -> dict[str, Collective]:
    x = torch.full((BYTES,), rank, dtype=torch.uint8)
    return {
        "sum": AllReduceOp(x.view(torch.float32), "sum"),
        "max": AllReduceOp(x, "max"),
        "gather": AllGatherOp(x),
        "swap": AllToAllOp(x, SPLITS, (SPLITS[rank],) * 3),
        "broadcast": BroadcastOp(x),
    }


def watch(rank: int, world: int, folder: str, names: list[str]) -> dict[str, tuple[float, float, Counters]]:
    store = dist.FileStore(f"{folder}/meeting", world)
    meet(store, world, "begun")
    dist.destroy_process_group()
    enter(names[rank])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=COLLECTIVE_TIMEOUT)
    link = TorchBackend()
    seen = {}
    for name, collective in collectives(rank).items():
        meet(store, world, f"{name} begins")
        before, traffic = read(), link.traffic
        meet(store, world, f"{name} goes on")
        link.run(collective)
        meet(store, world, f"{name} ends")
        sent, received = link.traffic.sent - traffic.sent, link.traffic.received - traffic.received
        seen[name] = (sent, received, read().since(before))
    return seen


@pytest.fixture(scope="module")
def ranks() -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        try:
            with namespaces(3) as names:
                return run_ranks(watch, 3, folder, names)
        except Unavailable as why:
            pytest.skip(str(why))


@pytest.mark.parametrize("name", collectives(0))
def test_a_collective_sends_the_bytes_of_the_model(name: str, ranks: list[Any]):
    # Once, three segments more were seen than were sent or counted as resent; probes of TCP's own are a guess.
    probes = 4 * SEGMENT
    resent = SEGMENT * sum(seen[name][2].resent for seen in ranks)
    for sent, received, counted in (seen[name] for seen in ranks):
        assert counted.data == pytest.approx(sent, rel=0.01, abs=2000 + probes)
        into = counted.received - FRAME * counted.received_frames
        assert into == pytest.approx(received, rel=0.01, abs=2000 + probes + resent)
