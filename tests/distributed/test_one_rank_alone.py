"""A change that one rank makes alone, while others take a step: an error that names both, on all ranks.

All ranks but the last took a step, and the collectives of both met: gloo ended the processes with SIGABRT.
"""

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import fixtures
import gradwire
from gradwire.comm import agreement_barrier
from spawn import Answers, cases_fixture, run_ranks

Change = Callable[[Any, Path], object]
CHANGES: dict[str, tuple[Change, str]] = {
    "set": (lambda wire, folder: wire.set("sign"), "set()"),
    "off": (lambda wire, folder: wire.off(), "off()"),
    "load_state_dict": (lambda wire, folder: wire.load_state_dict(wire.state_dict()), "load_state_dict()"),
    "load": (lambda wire, folder: gradwire.load(wire, folder), "load_state_dict()"),
    "an error": (lambda wire, folder: wire.set("topk(0.1"), "'topk(0.1'"),
}
PLAIN, WORLD = {"spec": "topk(0.1)"}, 3
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    **{f"{change}, plain loop": (change, "plain", PLAIN) for change in CHANGES},
    "set, DDP": ("set", "hook", PLAIN),
    "load, optimizer": ("load", "optimizer", PLAIN),
    "set, sums": ("set", "plain", {"spec": "fp16"}),
    "set, two_way": ("set", "plain", {"spec": "int8", "exchange": "two_way"}),
    "set, hosts": ("set", "plain", {"spec": "topk(0.1)", "across": [[0], [1], [2]]}),
    "set, overlap": ("set", "plain", {"spec": "topk(0.1)", "exchange": "delayed(allgather)"}),
}


def attach(entry: str, net: Any, options: dict[str, Any]) -> tuple[Any, Any, Callable[[], object]]:
    """The handle, what to run forward, and what to call after backward."""
    if entry == "optimizer":
        optimizer = fixtures.wrap_optimizer(net, **options)
        return optimizer.wire, net, optimizer.step
    outer = fixtures.ddp(net) if entry == "hook" else net
    wire, optimizer = gradwire.compress(outer, **options), fixtures.sgd(net)
    return wire, outer, optimizer.step if entry == "hook" else lambda: (wire(), optimizer.step())


def alone(rank: int, world: int, case: tuple[str, str, dict[str, Any]]) -> tuple[str, str, float]:
    """The errors of the change, or of a step instead, and of the step after it; and how long the first took."""
    change, entry, options = case
    agreement_barrier.STALL_SECONDS = 0.3
    net = fixtures.model()
    wire, outer, sync = attach(entry, net, options)

    def step(number: int) -> None:
        fixtures.loss(outer, rank, number).backward()
        sync()

    for number in range(2):
        step(number)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        if rank == world - 1:
            shutil.copy(gradwire.save(wire, folder), Path(folder, "wire-0.safetensors"))
            text = fixtures.error_text(lambda: CHANGES[change][0](wire, Path(folder)))
        else:
            text = fixtures.error_text(lambda: [step(2), step(3)])
    seconds = time.monotonic() - began
    return text, fixtures.error_text(lambda: [step(4), step(5)]), seconds


answers = cases_fixture(alone, WORLD, CASES)


@pytest.mark.parametrize("case", CASES)
def test_a_change_on_one_rank_alone_is_an_error_on_all_ranks(case: str, answers: Answers):
    words = ("RuntimeError", f"rank {WORLD - 1} called", CHANGES[CASES[case][0]][1], "takes a step")
    fixtures.check_message([(text, words) for text, _, _ in answers[case]])
    assert all(after != fixtures.NO_ERROR for _, after, _ in answers[case]), "the group goes on after the error"
    assert max(seconds for _, _, seconds in answers[case]) < 50, "ranks waited for the group's timeout"


def keys_after_changes(rank: int, world: int) -> list[int]:
    """How many keys the store has after each of several changes."""
    wire = gradwire.compress(fixtures.model(), **PLAIN)
    assert wire.link.barrier is not None
    counts = []
    for spec in ("sign", "topk(0.1)") * 3:
        wire.set(spec)
        dist.barrier()
        counts.append(wire.link.barrier._store.num_keys())
        dist.barrier()
    return counts


def test_agreements_leave_no_keys_behind():
    """Every change left a key of each rank, so that the store of a long run grew without end."""
    for counts in run_ranks(keys_after_changes, 2):
        assert len(set(counts[1:])) == 1, counts
