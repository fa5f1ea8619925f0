"""A second process with the rank of one that is still there: the first leaves, and says so.

Both went on, and took each other's place at their neighbor in every round.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import gradwire
from gossip_fixtures import Vector

WORLD = 3
PATIENCE = 30.0  # seconds of a busy machine


def join(folder: Path, rank: int, overlap: bool) -> Any:
    place: dict[str, Any] = {"meeting": folder, "rank": rank, "world": WORLD, "timeout": PATIENCE, "overlap": overlap}
    return gradwire.gossip(Vector(), "dpsgd(ring)", elastic=True, **place)


def until_error(net: Any, step: int = 10**9) -> str:
    deadline = time.monotonic() + 3 * PATIENCE
    try:
        while net.step < step and time.monotonic() < deadline:
            time.sleep(0.01)
            net()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("overlap", [False, True])
def test_a_rank_that_joins_twice_is_there_once(tmp_path: Path, overlap: bool) -> None:
    with ThreadPoolExecutor(WORLD + 1) as pool:
        nets = list(pool.map(partial(join, tmp_path, overlap=overlap), range(WORLD)))
        others = [pool.submit(until_error, nets[rank], 200) for rank in (0, 2)]
        first = pool.submit(until_error, nets[1])
        second = join(tmp_path, 1, overlap)
        assert "another process has joined as rank 1" in first.result(4 * PATIENCE)
        assert until_error(second, 200) == "" and [one.result(4 * PATIENCE) for one in others] == ["", ""]
        assert all(net.step >= 200 for net in (nets[0], second, nets[2]))
        list(pool.map(lambda net: net.close(), [*nets, second]))
