"""Accelerate: `gradwire.compress` with the Accelerator's scaler and checkpoints."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from gradwire.engine import Spec
from gradwire.integrations.checkpoint import load, save
from gradwire.integrations.compress import compress_from
from gradwire.integrations.ddp import find_ddp
from gradwire.integrations.entry_point import ACCELERATE, EntryPoint
from gradwire.integrations.local.handle import LocalSync
from gradwire.integrations.local.trainers import local_prepared, warn_inside_round
from gradwire.integrations.model import is_plain
from gradwire.integrations.optimizer import check_wire
from gradwire.integrations.wire import Wire


def attach(accelerator: Any, model: nn.Module, spec: Spec, **options: Any) -> Wire:
    """Compress the gradients of a model that ``accelerator.prepare`` has returned.

    From now on ``accelerator.save_state`` writes every rank's compression memory into the same folder, and
    ``accelerator.load_state`` reads it back, also into another number of ranks.

    Args:
        accelerator: An `accelerate.Accelerator`.
        model: The prepared model: in several processes, one in DistributedDataParallel, or under FSDP2 with replicas
            (``ParallelismConfig(dp_replicate_size=..., dp_shard_size=...)``).
        spec: See `gradwire.compress`, as for all other options.
        options: All of `gradwire.compress` but the scaler.

    Raises:
        ValueError: Among others: an optimizer that was prepared for the model has momentum, and so has the spec.
    """
    optimizers = [prepared.optimizer for prepared in accelerator._optimizers]
    wire = compress_prepared(ACCELERATE, accelerator, model, spec, options, optimizers)
    for optimizer in optimizers:
        check_wire(optimizer, wire)

    # The hooks also get the models, and the weights to be saved.
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: save(wire, folder))
    accelerator.register_load_state_pre_hook(lambda models, folder: load(wire, folder))
    return wire


def attach_local(accelerator: Any, model: nn.Module, spec: str, **options: Any) -> LocalSync:
    """Local steps of a model that ``accelerator.prepare`` has returned, with its optimizers.

    The loop stays as it is: the handle is called after each step of the last optimizer. ``accelerator.save_state``
    writes the state of every rank into the same folder, and ``accelerator.load_state`` reads it back.
    ``accelerator.end_training()`` warns where the training ends inside a round, whose steps are not averaged.

    Args:
        accelerator: An `accelerate.Accelerator`.
        model: The prepared model.
        spec: See `gradwire.local`, as for all other options.
        options: All of `gradwire.local`.
    """
    optimizers = [prepared.optimizer for prepared in accelerator._optimizers]
    outer = local_prepared(ACCELERATE, model, optimizers, spec, **options)
    last = _LoadedLast(outer)
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: save(outer, folder))
    accelerator.register_load_state_pre_hook(lambda models, folder: last.note(folder))
    accelerator.register_for_checkpointing(last)
    _before_end(accelerator, lambda: warn_inside_round(outer, "outer"))
    return outer


def _before_end(accelerator: Any, work: Callable[[], None]) -> None:
    """Do something when a loop calls ``accelerator.end_training()``, for which Accelerate has no hook."""
    end_training = accelerator.end_training

    def end() -> None:
        work()
        end_training()

    accelerator.end_training = end


class _LoadedLast:
    """Loads the state of a handle after models and optimizers, which Accelerate reads for all ranks from one file."""

    def __init__(self, outer: LocalSync) -> None:
        self.outer, self.folder = outer, ""

    def note(self, folder: str) -> None:
        self.folder = folder

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        load(self.outer, self.folder)


def compress_prepared(
    entry: EntryPoint,
    accelerator: Any,
    model: nn.Module,
    spec: Spec,
    options: Mapping[str, Any],
    optimizers: Sequence[Optimizer],
) -> Wire:
    """`gradwire.compress`, for a model that an Accelerator has wrapped in DDP or sharded, or has to itself."""
    if accelerator.num_processes > 1 and find_ddp(model) is None and all(map(is_plain, model.parameters())):
        raise ValueError(
            f"in {accelerator.num_processes} processes the prepared model is a {type(model).__name__}, and only the "
            "gradients of DistributedDataParallel, and of FSDP2 with replicas, are compressed; prepare it without "
            "DeepSpeed and the like"
        )
    optimizer = next(iter(optimizers), None)
    wire = compress_from(entry, model, spec, scaler=accelerator.scaler, **{"optimizer": optimizer, **options})
    if accelerator.num_processes != wire.link.world:
        raise ValueError(
            f"the Accelerator counts {accelerator.num_processes} processes, and the process group {wire.link.world}, "
            "so that each would train alone; on CPUs, build Accelerator(cpu=True), or TrainingArguments(use_cpu=True)"
        )
    return wire
