"""Trainers of other people with sharded models: what their loops compute is what a plain loop computes."""

import importlib.util
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.sharded_fixtures import mesh_of, whole
from tests.trainers.test_accelerate import accelerator_of
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import fixtures
import gradwire
from spawn import Answers, call_case, run_cases

OPTIONS: dict[str, Any] = {"spec": "topk(0.1)", "bucket_mb": fixtures.BUCKET_MB}
STEPS = 3


def expected(rank: int) -> dict[str, torch.Tensor]:
    """Two micro-batches to a step, by hand."""
    mesh = mesh_of(2, 2)
    net = fixtures.model()
    fully_shard(net, mesh=mesh["shard"])
    gradwire.compress(net, across=mesh["replicate"], **OPTIONS)
    optimizer = fixtures.sgd(net)
    for step in range(2 * STEPS):
        net.set_requires_gradient_sync(step % 2 == 1)
        (fixtures.loss(net, rank, step) / 2).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return whole(net)


def by_accelerate(rank: int, world: int) -> Any:
    """Accelerate knows FSDP on GPUs alone, so its state is told by hand that this is FSDP."""
    from accelerate import DistributedType, FullyShardedDataParallelPlugin, PartialState
    from accelerate.parallelism_config import ParallelismConfig

    from gradwire.integrations.accelerate import attach

    layout = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    accelerator = accelerator_of(rank, world, gradient_accumulation_steps=2)
    PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.parallelism_config = layout
    accelerator.state.device_mesh = layout.build_device_mesh("cpu")
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
    net = fixtures.model()
    model, optimizer = accelerator.prepare(net, fixtures.sgd(net))
    wire = attach(accelerator, model, **OPTIONS)
    for step in range(2 * STEPS):
        with accelerator.accumulate(model):
            accelerator.backward(fixtures.loss(model, rank, step))
            optimizer.step()
            optimizer.zero_grad()
    return whole(model), expected(rank), wire.report().steps


def by_lightning(rank: int, world: int) -> Any:
    """The module shards itself; the checkpoint of the Trainer holds the errors of all ranks."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import ModelParallelStrategy

    from gradwire.integrations.lightning import LightningCompression

    class Sharded(LightningModule):
        def configure_model(self) -> None:
            self.net = fixtures.model()
            fully_shard(self.net, mesh=mesh_of(2, 2))

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return fixtures.sgd(self)

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "TORCHELASTIC_RUN_ID": "x"}
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    compression = LightningCompression(**OPTIONS)
    strategy = ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1)
    options = {"accumulate_grad_batches": 2, "use_distributed_sampler": False, "max_epochs": 1, **quiet}
    trainer = Trainer(accelerator="cpu", devices=world, strategy=strategy, callbacks=[compression], **options)
    data = TensorDataset(torch.cat([fixtures.batch(rank, step) for step in range(2 * STEPS)]))
    module = Sharded()
    trainer.fit(module, DataLoader(data, 8))
    states: dict[str, Any] = {}
    compression.on_save_checkpoint(trainer, module, states)
    everything = [states["gradwire"]]
    dist.broadcast_object_list(everything)
    before = fixtures.memories(compression.wire)
    compression.wire.load_state_dict(everything[0])
    assert len(everything[0]) == world and fixtures.same(before, fixtures.memories(compression.wire))
    return whole(module.net), expected(rank), compression.wire.report().steps


CASES = {"accelerate": by_accelerate, "lightning": by_lightning}


@pytest.fixture(scope="module")
def answers() -> Answers:
    installed = {name: case for name, case in CASES.items() if importlib.util.find_spec(name) is not None}
    return run_cases(call_case, 4, installed)


@pytest.mark.study  # four ranks import Lightning and Accelerate
@pytest.mark.parametrize("case", CASES)
def test_a_trainer_computes_what_a_plain_loop_computes(answers: Answers, case: str) -> None:
    if importlib.util.find_spec(case) is None:
        pytest.skip(f"{case} is not installed: pip install gradwire[{case}]")
    for theirs, ours, steps in answers[case]:
        assert steps == STEPS
        assert fixtures.same(theirs, ours)
