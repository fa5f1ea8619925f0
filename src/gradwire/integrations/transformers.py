"""Hugging Face's Trainer: a callback that compresses gradients and saves memories with checkpoints."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gradwire.comm.backend import Backend
from gradwire.comm.collectives import AllReduceOp
from gradwire.core.renamed import renamed
from gradwire.engine import Spec
from gradwire.integrations.accelerate import compress_prepared
from gradwire.integrations.checkpoint import load, save
from gradwire.integrations.checksums import checksum
from gradwire.integrations.ddp import find_ddp
from gradwire.integrations.entry_point import TRANSFORMERS
from gradwire.integrations.local.handle import LocalSync
from gradwire.integrations.local.trainers import local_prepared, warn_inside_round, warn_of_last_steps
from gradwire.integrations.model import local_part
from gradwire.integrations.optimizer import check_wire
from gradwire.integrations.trainer_warnings import warn_of_start
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
            options: Those of `gradwire.compress`, except the scaler, which is the Trainer's own.
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
            warn_of_start(self.wire.engine.full_plan.start, state.max_steps, self.spec)

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
            _save(self.wire, [self.wire], _checkpoint(args, state))

    def _load(self, args: Any, state: Any) -> None:
        assert self.wire is not None
        folders = _candidates(self.resume, args, state)
        folder = _fitting(folders, [self.wire], self.wire.link)
        if folder is not None:
            load(self.wire, folder)
            return
        warnings.warn(
            f"training continues from step {state.global_step}, but {folders[-1]} holds no compression memories of "
            "this model, and they begin empty; if the checkpoint lies elsewhere, pass "
            "TrainerCompression(..., resume=FOLDER)",
            stacklevel=2,
        )


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
        model, scaler = self.trainer.model_wrapped, self.trainer.accelerator.scaler
        self.outer = local_prepared(TRANSFORMERS, model, [optimizer], self.spec, scaler, **self.options)
        if state.global_step:
            folders = _candidates(self.resume, args, state)
            folder = _fitting(folders, self.outer.wires, self.outer.link)
            if folder is None:
                raise ValueError(
                    f"{folders[-1]} holds no state of local steps that was saved with this model; if the checkpoint "
                    "lies elsewhere, pass TrainerLocalSteps(..., resume=FOLDER), and if it is of another training, "
                    "start from its model"
                )
            load(self.outer, folder)
        warn_of_last_steps(self.outer, self.spec, state.max_steps)

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if self.outer is not None and not args.save_only_model:
            _save(self.outer, self.outer.wires, _checkpoint(args, state))

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if self.outer is not None:
            warn_inside_round(self.outer, "callback.outer")
            self.outer.close(keep_weights=True)


def _candidates(given: str | Path | None, args: Any, state: Any) -> list[Path]:
    """Where the checkpoint may lie: a Trainer does not tell callbacks which path its train() was given."""
    if given is not None:
        return [Path(given)]
    argument = args.resume_from_checkpoint
    return [*([Path(argument)] if isinstance(argument, str) else []), Path(_checkpoint(args, state))]


def _fitting(folders: Sequence[Path], wires: Sequence[Wire], link: Backend) -> Path | None:
    """The first folder whose state was saved with the model that the Trainer has loaded; the same on all ranks."""
    fits = torch.tensor([int(_fits(folder, wires)) for folder in folders], device=link.device)
    found = link.move(AllReduceOp(fits, "max")).tolist()  # the checksum is of the shards of rank 0, if it is sharded
    return next((folder for folder, is_fit in zip(folders, found, strict=True) if is_fit), None)


def _save(handle: Wire | LocalSync, wires: Sequence[Wire], folder: Path) -> None:
    """Save a state, and which model of rank 0 it belongs to: the Trainer saves that one."""
    save(handle, folder)
    if handle.link.rank == 0:
        (folder / _MODEL).write_text(_checksum(wires))


def _fits(folder: Path, wires: Sequence[Wire]) -> bool:
    """Whether a folder holds a state that was saved with the parameters as they are now."""
    model = folder / _MODEL  # older checkpoints have none
    saved = any(folder.glob("wire-*.safetensors"))
    return saved and (not model.exists() or model.read_text() == _checksum(wires))


def _checksum(wires: Sequence[Wire]) -> str:
    """Of this rank's part of the model."""
    return checksum({name: local_part(p) for wire in wires for name, p in wire.parameters.items()})


def _checkpoint(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


__getattr__ = renamed({"Compression": "TrainerCompression"}, globals())
