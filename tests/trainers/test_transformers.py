"""Hugging Face's Trainer: with our callback, ranks stay equal, and a run resumes from its checkpoints."""

import importlib.util
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fixtures
import gradwire
from spawn import Answers, call_case, run_cases, run_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None or importlib.util.find_spec("accelerate") is None,
    reason="transformers is not installed: pip install gradwire[transformers]",
)
# Importing transformers takes seconds, so ranks alone import it, and one group of ranks serves all cases.

BATCH = 2
SPEC = "topk(0.05)"


def texts() -> list[dict[str, Tensor]]:
    """Sixty sequences of eight tokens."""
    tokens = torch.randint(0, 50, (60, 8), generator=torch.Generator().manual_seed(3))
    return [{"input_ids": row, "labels": row} for row in tokens]


def gpt(**options: float) -> Any:
    """A GPT-2 of two thousand parameters, its embedding tied to its head."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=8, n_embd=8, n_layer=1, n_head=1, **ends, **options))


def train(
    rank: int, world: int, folder: Path, steps: int, start: bool | str | None = None, spec: str = SPEC, **options: Any
) -> tuple[Any, Any]:
    """The callback and the model, after some steps on a CPU."""
    if world > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
        os.environ |= {"MASTER_PORT": "1"}  # the group exists, so this port is not used
    from accelerate.state import AcceleratorState
    from transformers import Trainer, TrainingArguments

    from gradwire.integrations.transformers import TrainerCompression, TrainerLocalSteps

    AcceleratorState._reset_state()
    kind = options.pop("kind", TrainerLocalSteps if "H=" in spec else TrainerCompression)
    resume, model, optimizer = options.pop("resume", None), options.pop("model", None), options.pop("optimizer", None)
    given = {"bucket_mb": fixtures.BUCKET_MB, **options.pop("given", {})}
    quiet: dict[str, Any] = {"report_to": [], "disable_tqdm": True, "logging_strategy": "no", "save_strategy": "no"}
    quiet |= {"use_cpu": True, "dataloader_pin_memory": False, "optim": "sgd", "learning_rate": 0.1}
    quiet |= {"lr_scheduler_type": "constant"}
    options = {"max_steps": steps, "per_device_train_batch_size": BATCH, **quiet, **options}
    settings = TrainingArguments(str(folder), **options)
    trainer = Trainer(model or gpt(), settings, train_dataset=texts(), optimizers=(optimizer, None))
    compression = kind(trainer, spec, resume=resume, **given)
    trainer.add_callback(compression)
    trainer.train(resume_from_checkpoint=start)
    return compression, trainer.model


def state_of(compression: Any, model: nn.Module) -> dict[str, Tensor]:
    return {**fixtures.tensors(model), **fixtures.memories(compression.wire)}


def equal_on_ranks(model: nn.Module) -> bool:
    return all(fixtures.same_on_all_ranks(p.detach()) for p in model.parameters())


def uninterrupted(rank: int, world: int, folder: Path) -> None:
    compression, model = train(rank, world, folder / "through", 6)
    assert equal_on_ranks(model)
    report = compression.wire.report()
    assert (report.steps, report.world) == (6, world) and report.payload_ratio > 5
    assert report.dense == 6 * 4 * sum(p.numel() for p in model.parameters())
    state = state_of(compression, model)
    assert any(bool(x.any()) for name, x in state.items() if name.startswith("residual/"))
    torch.save(state, folder / f"state-{rank}")
    train(rank, world, folder / "run", 3, save_strategy="steps", save_steps=3)


def resumed(rank: int, world: int, folder: Path, place: dict[str, Any]) -> None:
    compression, model = train(rank, world, steps=6, **place)
    assert fixtures.same(state_of(compression, model), torch.load(folder / f"state-{rank}"))
    assert compression.wire.report().steps == 3, "the report is of the second training alone"


def resumed_here(rank: int, world: int, folder: Path) -> None:
    resumed(rank, world, folder, {"folder": folder / "run", "start": True})


def resumed_by_name(rank: int, world: int, folder: Path) -> None:
    resumed(rank, world, folder, {"folder": folder / "run", "start": checkpoint(folder)})


def resumed_elsewhere(rank: int, world: int, folder: Path) -> None:
    saved = checkpoint(folder)
    resumed(rank, world, folder, {"folder": folder / "new", "start": saved, "resume": saved})


def resumed_without_state(rank: int, world: int, folder: Path) -> None:
    with pytest.warns(UserWarning, match=r"resume=FOLDER"):
        train(rank, world, folder / "lost", 4, checkpoint(folder))


def resumed_beside_another_run(rank: int, world: int, folder: Path) -> None:
    """The output folder holds a checkpoint of the same number, but of another model."""
    train(rank, world, folder / "other", 3, save_strategy="steps", save_steps=3, learning_rate=0.2)
    torch.distributed.barrier()
    with pytest.warns(UserWarning, match=r"resume=FOLDER"):
        compression, _ = train(rank, world, folder / "other", 4, checkpoint(folder))
    assert compression.wire.engine.unwrapped.step == 1, "memories begin empty"


def resumed_by_argument(rank: int, world: int, folder: Path) -> None:
    arguments = {"resume_from_checkpoint": True}
    resumed(rank, world, folder, {"folder": folder / "run", "start": True, **arguments})


def resumed_beside_a_stale_argument(rank: int, world: int, folder: Path) -> None:
    """The path that train() is given wins over that of the arguments, which is of another training."""
    train(rank, world, folder / "stale", 3, save_strategy="steps", save_steps=3, learning_rate=0.3)
    torch.distributed.barrier()
    stale = str(folder / "stale" / "checkpoint-3")
    place = {"folder": folder / "run", "start": checkpoint(folder), "resume_from_checkpoint": stale}
    resumed(rank, world, folder, place)
    spec, saving = "diloco(H=4)", {"save_strategy": "steps", "save_steps": 3}
    through, model = train(rank, world, folder / "rounds", 6, spec=spec, **saving)
    torch.distributed.barrier()
    start = str(folder / "rounds" / "checkpoint-3")
    again, other = train(rank, world, folder / "rounds", 6, start, spec=spec, resume_from_checkpoint=stale)
    assert fixtures.same(through.outer.state_dict(), again.outer.state_dict())
    assert fixtures.same(fixtures.tensors(model), fixtures.tensors(other))


def trained_twice(rank: int, world: int, folder: Path) -> None:
    """A second train() of the same Trainer continues with the wire, its memories and its step."""
    compression, model = train(rank, world, folder / "twice", 3)
    wire, before = compression.wire, fixtures.memories(compression.wire)
    assert wire.engine.unwrapped.step == 3
    compression.trainer.train()
    assert compression.wire is wire and wire.engine.unwrapped.step == wire.report().steps == 6
    assert equal_on_ranks(model) and not fixtures.same(before, fixtures.memories(wire))


def accumulated(rank: int, world: int, folder: Path) -> None:
    compression, model = train(rank, world, folder / "more", 3, gradient_accumulation_steps=2, bf16=True)
    assert compression.wire.report().steps == 3 and compression.wire.skipped == 0
    assert equal_on_ranks(model)


def momentum_twice(rank: int, world: int, folder: Path) -> None:
    text = fixtures.error_text(lambda: train(rank, world, folder / "adam", 1, spec="dgc(0.1)", optim="adamw_torch"))
    assert text.startswith("ValueError") and "AdamW" in text and "momentum" in text, text


def checkpoint(folder: Path) -> str:
    return str(folder / "run" / "checkpoint-3")


def local_steps(rank: int, world: int, folder: Path) -> None:
    """Replicas differ inside a round, and a run that was stopped there ends as one that was not."""
    spec, adam = "diloco(H=4)", {"optim": "adamw_torch", "save_strategy": "steps", "save_steps": 3}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        through, model = train(rank, world, folder / "local", 7, spec=spec, **adam)
    found = [one for one in seen if "inside a round" in str(one.message)]
    texts = [str(one.message) for one in found]
    assert len(texts) == 2 * (rank == 0) and {one.filename for one in found} <= {__file__}
    assert rank or texts[0] == "max_steps=7 ends inside a round of H=4; set max_steps=4 or 8"
    assert rank or ("3 steps" in texts[1] and "4 or 8 steps" in texts[1] and "callback.outer.averaged()" in texts[1])
    again, other = train(rank, world, folder / "local", 7, str(folder / "local" / "checkpoint-6"), spec=spec, **adam)
    assert through.outer.steps == again.outer.steps == 7 and through.outer.inside == 3
    assert not equal_on_ranks(model) and fixtures.same(fixtures.tensors(model), fixtures.tensors(other))
    assert fixtures.same(through.outer.state_dict(), again.outer.state_dict())
    assert through.trainer.model_wrapped.require_backward_grad_sync, "DDP averages again when the training has ended"
    train(rank, world, folder / "beside", 6, spec=spec, learning_rate=0.2, **adam)
    torch.distributed.barrier()
    saved = str(folder / "local" / "checkpoint-6")  # the output folder holds one of another model
    beside = fixtures.error_text(lambda: train(rank, world, folder / "beside", 7, saved, spec=spec, **adam))
    assert "holds no state of local steps" in beside and "resume=FOLDER" in beside, beside


def scheduled(rank: int, world: int, folder: Path) -> None:
    """Rounds of two steps, then one of three, which ends with the training; stopped inside either."""
    spec, adam = "local_schedule({0: diloco(H=2), 3: diloco(H=3, rate=0.5)})", {"optim": "adamw_torch"}
    place = {"save_strategy": "steps", "save_steps": 3}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        through, model = train(rank, world, folder / "schedule", 7, spec=spec, **adam, **place)
    assert not [one for one in seen if "inside a round" in str(one.message)] and equal_on_ranks(model)
    for step in (3, 6):
        saved = str(folder / "schedule" / f"checkpoint-{step}")
        again, other = train(rank, world, folder / f"from {step}", 7, saved, spec=spec, resume=saved, **adam)
        assert again.outer.method.H == 3 and fixtures.same(through.outer.state_dict(), again.outer.state_dict())
        assert fixtures.same(fixtures.tensors(model), fixtures.tensors(other))
    elsewhere = fixtures.error_text(lambda: train(rank, world, folder / "without", 7, saved, spec=spec, **adam))
    assert "holds no state of local steps" in elsewhere and "resume=FOLDER" in elsewhere, elsewhere


def in_the_start(rank: int, world: int, folder: Path) -> None:
    """A training that never leaves its start, or has no round, is warned of when it begins."""
    onebit = "onebit_adam"
    for spec, words in (
        (onebit, ("'onebit_adam' takes 256 of 2 steps", "no fewer than 100 steps", "take int4")),
        ("diloco(H=2, start=30)", ("takes 30 of 2 steps", "start=1")),
        ("diloco(H=5)", ("max_steps=2 ends inside a round of H=5; set max_steps=5",)),
    ):
        net = gpt()
        adam = gradwire.AdamW(net.parameters(), 0.01) if spec == onebit else None
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            callback, _ = train(rank, world, folder / "start", 2, spec=spec, model=net, optimizer=adam)
        texts = [
            str(one.message) for one in seen if "of 2 steps" in str(one.message) or "max_steps=2" in str(one.message)
        ]
        assert len(texts) == (rank == 0) and (rank or all(word in texts[0] for word in words)), (spec, texts)
        report = str((callback.wire if spec == onebit else callback.outer).report())
        assert "H=5" in spec or f"in the start: 2 of {256 if spec == onebit else 30} steps" in report, report
        assert "inf" not in report, report


def remedies(rank: int, world: int, folder: Path) -> None:
    """Errors name what the Trainer's users call."""
    from gradwire.integrations.transformers import TrainerCompression, TrainerLocalSteps

    rounds = fixtures.error_text(
        lambda: train(rank, world, folder / "rounds", 1, spec="sparseloco(H=5)", kind=TrainerCompression)
    )
    assert "'sparseloco(H=5)'" in rounds and "TrainerLocalSteps(trainer, 'sparseloco(H=5)')" in rounds, rounds
    adam = {"optim": "adamw_torch", "spec": "onebit_adam"}
    onebit = fixtures.error_text(lambda: train(rank, world, folder / "onebit-wrong", 1, **adam))
    assert "'onebit_adam'" in onebit and "optimizers=(opt, None)" in onebit, onebit
    assert "torch.optim.AdamW was given" in onebit and "common_momentum" not in onebit, onebit
    gradients = fixtures.error_text(lambda: train(rank, world, folder / "int4", 1, spec="int4", kind=TrainerLocalSteps))
    assert "TrainerLocalSteps takes" in gradients and "TrainerCompression(trainer, 'int4')" in gradients, gradients
    option = fixtures.error_text(lambda: train(rank, world, folder / "option", 1, given={"ratio": 0.1}))
    assert option.startswith("TypeError: TrainerCompression has no option ratio"), option


def warned_once(rank: int, world: int, folder: Path) -> None:
    """Though the Trainer has the optimizer checked when it begins, and the wire checks it when it steps."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        train(rank, world, folder / "starved", 2, spec="topk(0.01)", optim="adamw_torch")
    found = [one for one in seen if one.category is gradwire.OptimizerWarning]
    assert len(found) == (rank == 0) and all("optimizers=(opt, None)" in str(one.message) for one in found), found
    assert {one.filename for one in found} <= {__file__}


def onebit_adam_as_in_a_loop(rank: int, world: int, folder: Path) -> None:
    """A loop without the Trainer, over the batches that it took, ends with the same weights, bit for bit."""
    spec, steps, off = "onebit_adam(start=3, per=16)", 8, {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    batches: list[dict[str, Any]] = []
    model, net = gpt(**off), gpt(**off)
    model.register_forward_pre_hook(lambda _, args, inputs: batches.append(inputs), with_kwargs=True)
    adam, other = (gradwire.AdamW(own.parameters(), 0.01, weight_decay=0.1) for own in (model, net))
    by_rank = {"max_grad_norm": 0.0, "average_tokens_across_devices": False}
    train(rank, world, folder / "onebit", steps, spec=spec, model=model, optimizer=adam, **by_rank)
    wire = gradwire.compress(net, spec, optimizer=other, bucket_mb=fixtures.BUCKET_MB)
    assert len(batches) == steps and not fixtures.same_on_all_ranks(batches[0]["input_ids"])
    for inputs in batches:
        other.zero_grad()
        net(**inputs).loss.backward()
        wire()
        other.step()
    assert equal_on_ranks(model) and fixtures.same(fixtures.tensors(model), fixtures.tensors(net))


def onebit_adam_resumed(rank: int, world: int, folder: Path) -> None:
    """Inside the start, and after it."""
    saving = {"save_strategy": "steps", "save_steps": 2, "spec": "onebit_adam(start=3, per=16)"}
    states = []
    place = folder / "onebit-saved"
    for start in (None, "checkpoint-2", "checkpoint-4"):
        model = gpt()
        adam = gradwire.AdamW(model.parameters(), 0.01, weight_decay=0.1)
        begin = None if start is None else str(place / start)
        compression, _ = train(rank, world, place, 6, begin, model=model, optimizer=adam, **saving)
        states.append(state_of(compression, model))
    assert all(fixtures.same(states[0], state) for state in states[1:])


def ended_as_it_is(rank: int, world: int, folder: Path) -> None:
    """A Trainer loads its best model before callbacks hear of the end, so that they leave weights alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the message of the last round was not applied
        callback, model = train(rank, world, folder / "ended", 4, spec="diloco(H=4, delay=1)")
    assert callback.outer.inside == 0 and callback.outer.fragments[0].pending_result is not None
    assert not equal_on_ranks(model)


TWO_RANKS = {
    "ended as it is": ended_as_it_is,
    "onebit_adam resumed": onebit_adam_resumed,
    "onebit_adam as in a loop": onebit_adam_as_in_a_loop,
    "local steps": local_steps,
    "a schedule of rounds": scheduled,
    "remedies": remedies,
    "in the start": in_the_start,
    "warned once": warned_once,
    "uninterrupted": uninterrupted,
    "resumed in its folder": resumed_here,
    "resumed by name": resumed_by_name,
    "resumed elsewhere": resumed_elsewhere,
    "resumed without state": resumed_without_state,
    "resumed beside another run": resumed_beside_another_run,
    "resumed by an argument": resumed_by_argument,
    "resumed beside a stale argument": resumed_beside_a_stale_argument,
    "trained twice": trained_twice,
    "accumulated in bfloat16": accumulated,
    "momentum twice": momentum_twice,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("transformers")


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> Answers:
    return run_cases(call_case, 2, TWO_RANKS, folder)


@pytest.mark.parametrize("case", TWO_RANKS)
def test_two_ranks_stay_equal_and_resume(case: str, two_ranks: Answers):
    assert two_ranks[case] == [None, None]


def test_a_checkpoint_holds_the_state_of_all_ranks(folder: Path, two_ranks: Answers):
    assert two_ranks["uninterrupted"] == [None, None]
    names = {path.name for path in Path(checkpoint(folder)).glob("wire-*")}
    assert names == {"wire-0.safetensors", "wire-1.safetensors"}


def saving(rank: int, world: int, folder: Path) -> None:
    train(rank, world, folder / "run", 3, save_strategy="steps", save_steps=3)


@pytest.mark.study
def test_one_process_resumes_a_checkpoint_of_two(tmp_path):
    run_ranks(saving, 2, tmp_path)
    run_ranks(one_rank, 1, tmp_path)


def one_rank(rank: int, world: int, folder: Path) -> None:
    """One process has no DDP; the checkpoint of two ranks serves it all the same."""
    alone, model = train(rank, world, folder / "run", 4, str(folder / "run" / "checkpoint-3"))
    assert alone.trainer.model_wrapped is model
    assert (
        isinstance(alone.wire, gradwire.Wire)
        and alone.wire.report().steps == 1
        and alone.wire.engine.unwrapped.step == 4
    )
