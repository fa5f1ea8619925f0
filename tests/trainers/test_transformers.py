"""Hugging Face's Trainer: compressed by our callback, it keeps ranks alike and goes on where it was."""

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fixtures
import gradwire
from spawn import run_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None or importlib.util.find_spec("accelerate") is None,
    reason="transformers is not installed: pip install gradwire[transformers]",
)
# Importing transformers takes seconds, so ranks alone import it, and each tells several stories.

BATCH = 2
SPEC = "topk(0.05)"


def texts() -> list[dict[str, Tensor]]:
    """Sixty sequences of eight tokens."""
    tokens = torch.randint(0, 50, (60, 8), generator=torch.Generator().manual_seed(3))
    return [{"input_ids": row, "labels": row} for row in tokens]


def gpt() -> Any:
    """A GPT-2 of two thousand parameters, its embedding tied to its head."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=8, n_embd=8, n_layer=1, n_head=1, **ends))


def train(
    rank: int, world: int, folder: Path, steps: int, start: bool | str | None = None, spec: str = SPEC, **options: Any
) -> tuple[Any, Any]:
    """The callback and the model, after some steps on a CPU."""
    if world > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
        os.environ |= {"MASTER_PORT": "1"}  # the group exists, so nobody goes there
    from accelerate.state import AcceleratorState
    from transformers import Trainer, TrainingArguments

    from gradwire.integrations.transformers import Compression

    AcceleratorState._reset_state()
    resume = options.pop("resume", None)
    quiet: dict[str, Any] = {"report_to": [], "disable_tqdm": True, "logging_strategy": "no", "save_strategy": "no"}
    quiet |= {"use_cpu": True, "dataloader_pin_memory": False, "optim": "sgd", "learning_rate": 0.1}
    quiet |= {"lr_scheduler_type": "constant"}
    options = {"max_steps": steps, "per_device_train_batch_size": BATCH, **quiet, **options}
    trainer = Trainer(gpt(), TrainingArguments(str(folder), **options), train_dataset=texts())
    compression = Compression(trainer, spec, resume=resume, launch_mb=fixtures.LAUNCH_MB)
    trainer.add_callback(compression)
    trainer.train(resume_from_checkpoint=start)
    return compression, trainer.model


def state_of(compression: Any, model: nn.Module) -> dict[str, Tensor]:
    return {**fixtures.tensors(model), **fixtures.memories(compression.wire)}


def alike(model: nn.Module) -> bool:
    return all(fixtures.agreed(p.detach()) for p in model.parameters())


def two_ranks(rank: int, world: int, folder: Path) -> None:
    through, model = train(rank, world, folder / "through", 6)
    assert alike(model)
    report = through.wire.report()
    assert (report.steps, report.world) == (6, world) and report.payload_ratio > 5
    assert report.dense == 6 * 4 * sum(p.numel() for p in model.parameters())
    whole = state_of(through, model)
    assert any(bool(x.any()) for name, x in whole.items() if name.startswith("residual/"))

    saved = str(folder / "run" / "checkpoint-3")
    train(rank, world, folder / "run", 3, save_strategy="steps", save_steps=3)
    places: tuple[dict[str, Any], ...] = (
        {"folder": folder / "run", "start": True},
        {"folder": folder / "run", "start": saved},
        {"folder": folder / "new", "start": saved, "resume": saved},
    )
    for place in places:
        again, model = train(rank, world, steps=6, **place)
        assert fixtures.same(state_of(again, model), whole), place
        assert again.wire.report().steps == 3, "the account is of the second training alone"
    with pytest.warns(UserWarning, match=r"holds no compression memories, and they begin empty.*resume=FOLDER"):
        train(rank, world, folder / "lost", 4, saved)

    accumulating, model = train(rank, world, folder / "more", 3, gradient_accumulation_steps=2, bf16=True)
    assert accumulating.wire.report().steps == 3 and accumulating.wire.skipped == 0
    assert alike(model)
    said = fixtures.sentence(lambda: train(rank, world, folder / "adam", 1, spec="dgc(0.1)", optim="adamw_torch"))
    assert "AdamW has momentum of its own" in said


def test_two_ranks_stay_alike_and_go_on_where_they_were(tmp_path):
    run_ranks(two_ranks, 2, tmp_path, timeout=100)
    checkpoint = tmp_path / "run" / "checkpoint-3"
    assert {path.name for path in checkpoint.glob("wire-*")} == {"wire-0.safetensors", "wire-1.safetensors"}


def saving(rank: int, world: int, folder: Path) -> None:
    train(rank, world, folder / "run", 3, save_strategy="steps", save_steps=3)


@pytest.mark.study
def test_one_process_goes_on_from_a_checkpoint_of_two(tmp_path):
    run_ranks(saving, 2, tmp_path, timeout=100)
    run_ranks(one_rank, 1, tmp_path, timeout=100)


def one_rank(rank: int, world: int, folder: Path) -> None:
    """One process has no DDP; the checkpoint of two ranks serves it all the same."""
    alone, model = train(rank, world, folder / "run", 4, str(folder / "run" / "checkpoint-3"))
    assert alone.trainer.model_wrapped is model
    assert isinstance(alone.wire, gradwire.Wire) and alone.wire.report().steps == 1 and alone.wire.session.step == 4
