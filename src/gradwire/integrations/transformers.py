"""Hugging Face's Trainer: a callback that compresses gradients and saves memories with checkpoints."""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gradwire.comm.collectives import AllReduceOp
from gradwire.core.renamed import renamed
from gradwire.engine import Spec
from gradwire.integrations.accelerate import compress_prepared
from gradwire.integrations.checkpoint import load, save
from gradwire.integrations.checksums import checksum
from gradwire.integrations.consistency import errors_on_all_ranks
from gradwire.integrations.ddp import find_ddp
from gradwire.integrations.entry_point import TRANSFORMERS
from gradwire.integrations.local.handle import LocalSync
from gradwire.integrations.local.trainers import local_prepared, warn_inside_round, warn_of_last_steps
from gradwire.integrations.model import local_part
from gradwire.integrations.optimizer import check_wire
from gradwire.integrations.trainer_warnings import warn_long_start
from gradwire.integrations.wire import Wire

if TYPE_CHECKING:
    TrainerCallback = object
else:
    from transformers import TrainerCallback

_MODEL = "compression-model.crc32"  # in a checkpoint: the checksum of the parameters that its memories belong to


class TrainerCompression(TrainerCallback):
    """Compresses gradients while a Trainer trains.

    Add it by ``trainer.add_callback(TrainerCompression(trainer, "topk(0.01) | sign"))``.

    Every checkpoint folder gets the memories of all ranks, and ``train(resume_from_checkpoint=...)`` continues with
    them, also on another number of ranks. Memories that were saved with another model are not loaded.

    Attributes:
        wire: The handle, from the start of a training on; ``wire.report()`` and the rest.
    """

    def __init__(self, trainer: Any, spec: Spec, *, resume: str | Path | None = None, **options: Any) -> None:
        """Take a Trainer, whose callback this is to be.

        Args:
            trainer: A `transformers.Trainer`. Its callbacks never see the model in its DistributedDataParallel, so
                they need the Trainer itself.
            spec: See `gradwire.compress`.
            resume: The checkpoint that is resumed from, if it is neither one of ``args.output_dir`` nor
                ``args.resume_from_checkpoint``.
            options: Those of `gradwire.compress`, but for the scaler, which is the Trainer's own.
        """
        self.trainer, self.spec, self.resume, self.options = trainer, spec, resume, options
        self.wire: Wire | None = None
        self._model: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        model = self.trainer.model_wrapped
        if self.wire is None or model is not self._model:
            self._attach(model)
        if state.global_step:
            self._load(args, state)
        assert self.wire is not None
        if self.wire.link.rank == 0:
            warn_long_start(self.wire.engine.full_plan.start, state.max_steps, self.spec)

    def _attach(self, model: Any) -> None:
        accelerator = self.trainer.accelerator
        if accelerator.scaler is not None and accelerator.num_processes == 1:
            raise ValueError(
                "a Trainer in one process may or may not have unscaled its gradients when it steps, so compression "
                "does not work under fp16; train with bf16=True, or in several processes"
            )
        optimizer = self.trainer.optimizer
        optimizer = getattr(optimizer, "optimizer", optimizer)
        self._model = model
        self.wire = compress_prepared(TRANSFORMERS, accelerator, model, self.spec, self.options, [optimizer])
        check_wire(optimizer, self.wire)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if self.wire is not None and find_ddp(self._model) is None:
            self.wire()

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if self.wire is not None and not args.save_only_model:
            folder = save(self.wire, _checkpoint(args, state)).parent
            if self.wire.link.rank == 0:
                (folder / _MODEL).write_text(_checksum(self.wire))

    def _load(self, args: Any, state: Any) -> None:
        assert self.wire is not None
        given = args.resume_from_checkpoint
        folder = Path(self.resume or (given if isinstance(given, str) else None) or _checkpoint(args, state))
        flag = torch.tensor([int(self._fits(folder))], device=self.wire.link.device)
        if self.wire.link.move(AllReduceOp(flag, "max")).item():  # or some ranks would load, and others not
            load(self.wire, folder)
            return
        warnings.warn(
            f"training continues from step {state.global_step}, but {folder} holds no compression memories of this "
            "model, and they begin empty; if the checkpoint lies elsewhere, pass "
            "TrainerCompression(..., resume=FOLDER)",
            stacklevel=2,
        )

    def _fits(self, folder: Path) -> bool:
        """Whether a folder holds memories that were saved with the parameters as they are now."""
        assert self.wire is not None
        model = folder / _MODEL  # older checkpoints have none
        saved = any(folder.glob("wire-*.safetensors"))
        return saved and (not model.exists() or model.read_text() == _checksum(self.wire))


class TrainerLocalSteps(TrainerCallback):
    """Local steps while a Trainer trains.

    Add it by ``trainer.add_callback(TrainerLocalSteps(trainer, "sparseloco(H=5)"))``. Every checkpoint folder gets the
    state of all ranks, and ``train(resume_from_checkpoint=...)`` continues with it. A training that ends inside a round
    is warned of: its last steps are not averaged.

    Attributes:
        outer: The handle, from the start of a training on; ``outer.report()`` and the rest.
    """

    def __init__(self, trainer: Any, spec: str, *, resume: str | Path | None = None, **options: Any) -> None:
        """Take a Trainer, whose callback this is to be; options as for `gradwire.local`."""
        self.trainer, self.spec, self.resume, self.options = trainer, spec, resume, options
        self.outer: LocalSync | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        optimizer = self.trainer.optimizer
        optimizer = getattr(optimizer, "optimizer", optimizer)
        self.outer = local_prepared(TRANSFORMERS, self.trainer.model_wrapped, [optimizer], self.spec, **self.options)
        if state.global_step:
            given = args.resume_from_checkpoint
            folder = Path(self.resume or (given if isinstance(given, str) else None) or _checkpoint(args, state))
            with errors_on_all_ranks(self.outer.link):
                _check_state(folder)
            load(self.outer, folder)
        warn_of_last_steps(self.outer, self.spec, state.max_steps)

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if self.outer is not None and not args.save_only_model:
            save(self.outer, _checkpoint(args, state))

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if self.outer is not None:
            warn_inside_round(self.outer, "callback.outer")


def _check_state(folder: Path) -> None:
    if not any(folder.glob("wire-*.safetensors")):
        raise ValueError(
            f"{folder} holds no state of local steps; if the checkpoint lies elsewhere, pass "
            "TrainerLocalSteps(..., resume=FOLDER), and if it is of another training, start from its model"
        )


def _checksum(wire: Wire) -> str:
    """Of this rank's part of the model."""
    return checksum({name: local_part(p) for name, p in wire.parameters.items()})


def _checkpoint(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


__getattr__ = renamed({"Compression": "TrainerCompression"}, globals())
