"""Trainers of other people with sharded models: what their loops compute is what a plain loop computes."""

import importlib.util
import os
import shutil
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.sharded_fixtures import mesh_of, whole
from tests.trainers.test_transformers import gpt, texts
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import fixtures
import gradwire
from spawn import Answers, call_case, run_cases

OPTIONS: dict[str, Any] = {"spec": "topk(0.1)", "bucket_mb": fixtures.BUCKET_MB}
STEPS = 3
LR = 0.01


def environment_of(rank: int, world: int) -> None:
    """What torchrun sets. The group exists, so the port is not used."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "TORCHELASTIC_RUN_ID": "x"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def expected(rank: int, start: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """Two micro-batches to a step, by hand; from some weights on."""
    mesh = mesh_of(2, 2)
    net = fixtures.model()
    net.load_state_dict(start or net.state_dict())
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


def call_cpus_gpus() -> None:
    """Accelerate knows FSDP on GPUs alone, so it is told that these are some. All else is what a user configures."""
    from accelerate import DistributedType, PartialState

    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def accelerator_of(rank: int, world: int, **options: Any) -> Any:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig, PartialState
    from accelerate.state import AcceleratorState

    environment_of(rank, world)
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(cpu=True)
    call_cpus_gpus()
    return Accelerator(
        cpu=True,
        parallelism_config=ParallelismConfig(dp_replicate_size=2, dp_shard_size=2),
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False),
        **options,
    )


def local_by_accelerate(rank: int, world: int) -> Any:
    """Local steps: a round of all steps, whose averages inside a replica are FSDP's."""
    from gradwire.integrations.accelerate import attach_local

    method: dict[str, Any] = {"spec": f"diloco(H={STEPS})", "codec": "int8"}
    accelerator, net = accelerator_of(rank, world), fixtures.model()
    model, optimizer = accelerator.prepare(net, fixtures.sgd(net))
    theirs = attach_local(accelerator, model, **method)
    mesh, other = mesh_of(2, 2), fixtures.model()
    fully_shard(other, mesh=mesh["shard"])
    plain = fixtures.sgd(other)
    ours = gradwire.local(other, plain, across=mesh["replicate"], **method)
    for step in range(STEPS):
        for each in (optimizer, plain):
            each.zero_grad()
        accelerator.backward(fixtures.loss(model, rank, step))
        fixtures.loss(other, rank, step).backward()
        optimizer.step()
        plain.step()
        ours()
    assert theirs.report().rounds.steps == ours.report().rounds.steps == 1
    return whole(model), whole(other), theirs.report().local_steps


def by_accelerate(rank: int, world: int) -> Any:
    from gradwire.integrations.accelerate import attach

    accelerator, net = accelerator_of(rank, world, gradient_accumulation_steps=2), fixtures.model()
    model, optimizer = accelerator.prepare(net, fixtures.sgd(net))
    wire = attach(accelerator, model, **OPTIONS)
    for step in range(2 * STEPS):
        with accelerator.accumulate(model):
            accelerator.backward(fixtures.loss(model, rank, step))
            optimizer.step()
            optimizer.zero_grad()
    return whole(model), expected(rank), wire.report().steps


def by_transformers(rank: int, world: int) -> Any:
    """A Trainer saves in the middle, and another one resumes; the loop by hand sees the batches of the first."""
    from accelerate import ParallelismConfig
    from transformers import Trainer, TrainingArguments

    from gradwire.integrations.transformers import TrainerCompression

    environment_of(rank, world)
    options: dict[str, Any] = {"use_cpu": True, "dataloader_pin_memory": False, "report_to": [], "disable_tqdm": True}
    options |= {"optim": "adamw_torch", "learning_rate": LR, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    options |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": STEPS}
    options |= {"average_tokens_across_devices": False, "logging_strategy": "no", "save_steps": STEPS - 1}
    layers = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": "GPT2Block"}
    options |= {"fsdp": True, "fsdp_config": {"fsdp_version": 2, **layers}}
    folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)
    batches: list[dict[str, Any]] = []

    def trained(resume: str | None = None) -> tuple[Any, dict[str, torch.Tensor]]:
        layout = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
        arguments = TrainingArguments(folders[0], parallelism_config=layout, **options)
        call_cpus_gpus()
        net = steady_gpt()
        net.register_forward_pre_hook(lambda module, given, named: batches.append(named), with_kwargs=True)
        trainer = Trainer(net, arguments, train_dataset=texts())
        compression = TrainerCompression(trainer, **OPTIONS)
        trainer.add_callback(compression)
        trainer.train(resume_from_checkpoint=resume)
        assert compression.wire is not None
        return compression.wire, whole(trainer.model)

    wire, params = trained()
    seen, steps = batches[: 2 * STEPS], wire.report().steps
    again, resumed = trained(f"{folders[0]}/checkpoint-{STEPS - 1}")
    assert fixtures.same(params, resumed) and fixtures.same(fixtures.memories(wire), fixtures.memories(again))
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folders[0])
    return params, by_hand(seen), steps


def steady_gpt() -> Any:
    """A GPT-2 without dropout."""
    net = gpt()
    for module in net.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return net


def by_hand(batches: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A GPT-2 whose blocks are sharded; two micro-batches to a step."""
    mesh, net = mesh_of(2, 2), steady_gpt()
    for block in net.transformer.h:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(net, mesh=mesh["shard"])
    gradwire.compress(net, across=mesh["replicate"], **OPTIONS)
    optimizer = torch.optim.AdamW(net.parameters(), LR, weight_decay=0.0)
    for step, batch in enumerate(batches):
        net.set_requires_gradient_sync(step % 2 == 1)
        net(**batch).loss.backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return whole(net)


def sharded_module(manual: bool = False) -> Any:
    """A LightningModule that shards itself, and adds two batches up to a step if it optimizes by hand."""
    from lightning.pytorch import LightningModule

    class Sharded(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = not manual

        def configure_model(self) -> None:
            if not hasattr(self, "net"):
                self.net = fixtures.model()
                fully_shard(self.net, mesh=mesh_of(2, 2))

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            loss = self.net(batch[0]).square().mean()
            if manual:
                self.net.set_requires_gradient_sync(batch_idx % 2 == 1)
                self.manual_backward(loss / 2)
            if manual and batch_idx % 2:
                self.optimizers().step()
                self.optimizers().zero_grad()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return fixtures.sgd(self)

    return Sharded()


def fit(rank: int, world: int, module: Any, callback: Any, **options: Any) -> Any:
    """The Trainer, after as many batches as make all steps."""
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import ModelParallelStrategy

    environment_of(rank, world)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    strategy = ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1)
    options |= {"use_distributed_sampler": False, "max_epochs": 1, **quiet}
    trainer = Trainer(accelerator="cpu", devices=world, strategy=strategy, callbacks=[callback], **options)
    data = TensorDataset(torch.cat([fixtures.batch(rank, step) for step in range(2 * STEPS)]))
    trainer.fit(module, DataLoader(data, 8))
    return trainer


def by_lightning(rank: int, world: int) -> Any:
    """The module shards itself; the checkpoint of the Trainer holds the errors of all ranks."""
    from gradwire.integrations.lightning import LightningCompression

    compression, module = LightningCompression(**OPTIONS), sharded_module()
    trainer = fit(rank, world, module, compression, accumulate_grad_batches=2)
    states: dict[str, Any] = {}
    compression.on_save_checkpoint(trainer, module, states)
    everything = [states["gradwire"]]
    dist.broadcast_object_list(everything)
    before = fixtures.memories(compression.wire)
    compression.wire.load_state_dict(everything[0])
    assert len(everything[0]) == world and fixtures.same(before, fixtures.memories(compression.wire))
    return whole(module.net), expected(rank), compression.wire.report().steps


def by_lightning_by_hand(rank: int, world: int) -> Any:
    """The module says itself which passes FSDP reduces."""
    from gradwire.integrations.lightning import LightningCompression

    compression, module = LightningCompression(**OPTIONS), sharded_module(manual=True)
    fit(rank, world, module, compression)
    assert compression.wire is not None
    return whole(module.net), expected(rank), compression.wire.report().steps


def by_lightning_twice(rank: int, world: int) -> Any:
    """A second fit of a module begins with empty memories; after it, another callback or none takes the module."""
    from lightning.pytorch import Callback

    from gradwire.integrations.lightning import LightningCompression

    compression, module = LightningCompression(**OPTIONS), sharded_module()
    fit(rank, world, module, compression, accumulate_grad_batches=2)
    first = whole(module.net)
    fit(rank, world, module, compression, accumulate_grad_batches=2)
    second, steps = whole(module.net), compression.wire.report().steps
    for callback in (LightningCompression("int4"), Callback()):
        fit(rank, world, module, callback)
        assert all(fixtures.same_on_all_ranks(x) for x in whole(module.net).values())
    assert compression.wire.report().steps == STEPS, "the last fits are not of this wire"
    return second, expected(rank, first), steps


def local_by_lightning_twice(rank: int, world: int) -> Any:
    """Replicas exchange in the second fit, too; in a fit without the callback, FSDP averages them in every step."""
    from lightning.pytorch import Callback

    from gradwire.integrations.lightning import LightningLocalSteps

    module = sharded_module()
    for _ in (1, 2):
        local_steps = LightningLocalSteps("local_sgd(H=2)")
        fit(rank, world, module, local_steps)
    params = whole(module.net)
    replicas: list[Any] = [None] * world
    dist.all_gather_object(replicas, params)
    fit(rank, world, module, Callback())
    assert all(fixtures.same_on_all_ranks(x) for x in whole(module.net).values()), "FSDP does not average again"
    return params, replicas[-1], local_steps.outer.rounds


CASES = {
    "accelerate": by_accelerate,
    "accelerate, local steps": local_by_accelerate,
    "transformers": by_transformers,
    "lightning": by_lightning,
    "lightning, by hand": by_lightning_by_hand,
    "lightning, twice": by_lightning_twice,
    "lightning, local steps twice": local_by_lightning_twice,
}


def is_installed(case: str) -> bool:
    return importlib.util.find_spec(case.partition(",")[0]) is not None


@pytest.fixture(scope="module")
def answers() -> Answers:
    installed = {name: case for name, case in CASES.items() if is_installed(name)}
    return run_cases(call_case, 4, installed)


@pytest.mark.study  # four ranks import Lightning and Accelerate
@pytest.mark.parametrize("case", CASES)
def test_a_trainer_computes_what_a_plain_loop_computes(answers: Answers, case: str) -> None:
    if not is_installed(case):
        pytest.skip(f"{case} is not installed: pip install gradwire[dev]")
    for theirs, ours, steps in answers[case]:
        assert steps == STEPS
        assert fixtures.same(theirs, ours)
