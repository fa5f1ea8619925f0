"""Accelerate: what a loop of theirs computes with one line of ours is what a plain loop computes."""

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fixtures
import gradwire
from spawn import run_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None,
    reason="Accelerate is not installed: pip install gradwire[accelerate]",
)
OPTIONS: dict[str, Any] = {"spec": "topk(0.1)", "launch_mb": fixtures.LAUNCH_MB}


def accelerator_of(rank: int, world: int, **options: Any) -> Any:
    """An Accelerator of this rank, as under torchrun."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": "1"}  # the group exists, so nobody goes there
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(**{"cpu": True, **options})


def march(accelerator: Any, model: nn.Module, optimizer: Any, steps: range, rank: int) -> None:
    """As Accelerate's manual writes it; two passes to a step."""
    for step in range(2 * steps.start, 2 * steps.stop):
        with accelerator.accumulate(model):
            accelerator.backward(fixtures.loss(model, rank, step))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()


def expected(rank: int, steps: range) -> tuple[gradwire.Wire, nn.Module]:
    net = fixtures.model()
    wire = gradwire.compress(net, **OPTIONS)
    optimizer = fixtures.sgd(net)
    for step in steps:
        for i in (0, 1):
            (fixtures.loss(net, rank, 2 * step + i) / 2).backward()
        wire()
        nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    return wire, net


def equal(wire: gradwire.Wire, net: nn.Module, other: tuple[gradwire.Wire, nn.Module]) -> bool:
    return fixtures.same(fixtures.tensors(net), fixtures.tensors(other[1])) and fixtures.same(
        wire.debts(), other[0].debts()
    )


def two_ranks(rank: int, world: int, folder: Path) -> None:
    from gradwire.integrations.accelerate import attach

    through = expected(rank, range(6))
    halfway = expected(rank, range(3))
    accelerator = accelerator_of(rank, world, gradient_accumulation_steps=2)
    net = fixtures.model()
    model, optimizer = accelerator.prepare(net, fixtures.sgd(net))
    wire = gradwire.compress(model, **OPTIONS)  # one line is enough, without checkpoints
    march(accelerator, model, optimizer, range(3), rank)
    assert equal(wire, net, halfway)
    assert (wire.report().steps, wire.report().payload) == (3, halfway[0].report().payload)

    for start, stop in ((0, 3), (3, 6)):  # the second time in the place of another run, from the first one's checkpoint
        accelerator = accelerator_of(rank, world, gradient_accumulation_steps=2)
        net = fixtures.model(seed=start)
        model, optimizer = accelerator.prepare(net, fixtures.sgd(net))
        wire = attach(accelerator, model, **OPTIONS)
        if start:
            accelerator.load_state(str(folder))
        march(accelerator, model, optimizer, range(start, stop), rank)
        if not start:
            accelerator.save_state(str(folder))
    assert equal(wire, net, through), "resuming changes nothing"
    assert all(fixtures.agreed(p.detach()) for p in net.parameters())

    accelerator = accelerator_of(rank, world, gradient_accumulation_steps=2, mixed_precision="bf16")
    net = fixtures.model()
    model, optimizer = accelerator.prepare(net, fixtures.sgd(net))
    wire = attach(accelerator, model, **OPTIONS)
    march(accelerator, model, optimizer, range(3), rank)
    assert all(fixtures.agreed(p.detach()) for p in net.parameters())
    assert not equal(wire, net, halfway), "bfloat16 rounds"
    torch.testing.assert_close(net[0].weight, halfway[1][0].weight, rtol=0.1, atol=0.01)
    said = fixtures.sentence(lambda: attach(accelerator, net, **OPTIONS))
    assert "in 2 processes the prepared model is a Sequential" in said and "DistributedDataParallel" in said
    twice(rank, world)
    lonely(rank, world)


def twice(rank: int, world: int) -> None:
    """Momentum before compression and again after it."""
    from gradwire.integrations.accelerate import attach

    accelerator = accelerator_of(rank, world)
    net, other = fixtures.model(), fixtures.model()
    model, _, _ = accelerator.prepare(net, fixtures.sgd(net), fixtures.sgd(other, momentum=0.9))  # whose is no matter
    attach(accelerator, model, "dgc(0.1)")
    model, _ = accelerator.prepare(other, fixtures.sgd(other, momentum=0.9))
    said = fixtures.sentence(lambda: attach(accelerator, model, "dgc(0.1)"))
    assert "SGD has momentum of its own" in said and "gradwire.SGD" in said


def lonely(rank: int, world: int) -> None:
    """Without a GPU, and without being told to use CPUs, a new Accelerate takes every process for the only one."""
    from gradwire.integrations.accelerate import attach

    accelerator = accelerator_of(rank, world, cpu=False)
    model = accelerator.prepare(fixtures.model())
    said = fixtures.sentence(lambda: attach(accelerator, model, **OPTIONS))
    if accelerator.num_processes == world:
        assert said == "no refusal"
    else:
        assert "counts 1 processes, and the process group 2" in said and "cpu=True" in said


def test_two_ranks_compute_what_a_plain_loop_computes(tmp_path):
    run_ranks(two_ranks, 2, tmp_path)
    assert {path.name for path in tmp_path.glob("wire-*")} == {"wire-0.safetensors", "wire-1.safetensors"}
    run_ranks(one_rank, 1, tmp_path)


def one_rank(rank: int, world: int, folder: Path) -> None:
    """The checkpoint of two ranks, gone on with by one."""
    from gradwire.integrations.accelerate import attach

    accelerator = accelerator_of(rank, world)
    net = fixtures.model()
    model, optimizer = accelerator.prepare(net, fixtures.sgd(net))
    wire = attach(accelerator, model, **OPTIONS)
    accelerator.load_state(str(folder))
    assert wire.session.step == 3
    march(accelerator, model, optimizer, range(1), rank)
    assert wire.report().steps == 2  # nothing is accumulated
