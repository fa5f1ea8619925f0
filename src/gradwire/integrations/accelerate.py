"""Accelerate: `gradwire.compress` with the Accelerator's scaler and checkpoints."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.optim import Optimizer

from gradwire.engine import Spec
from gradwire.integrations.checkpoint import load, save
from gradwire.integrations.compress import compress_from
from gradwire.integrations.ddp import find_ddp
from gradwire.integrations.entry_point import ACCELERATE, EntryPoint
from gradwire.integrations.local.handle import LocalSync
from gradwire.integrations.local.trainers import local_prepared, warn_inside_round
from gradwire.integrations.model import is_sharded, optimizers_of, reshard
from gradwire.integrations.optimizer import check_wire
from gradwire.integrations.wire import Wire, write_missing


def attach(accelerator: Any, model: nn.Module, spec: Spec, **options: Any) -> Wire:
    """Compress the gradients of a model that ``accelerator.prepare`` has returned.

    From now on ``accelerator.save_state`` writes every rank's compression memory into the same folder, and
    ``accelerator.load_state`` reads it back, also with another number of ranks. In one process without
    DistributedDataParallel, gradients are compressed when the prepared optimizer steps.

    Args:
        accelerator: An `accelerate.Accelerator`.
        model: The prepared model: in several processes, one in DistributedDataParallel, or under FSDP2 with replicas
            (``ParallelismConfig(dp_replicate_size=..., dp_shard_size=...)``).
        spec: See `gradwire.compress`, as for all other options.
        options: All of `gradwire.compress` except the scaler.

    Raises:
        ValueError: For example: an optimizer that was prepared for the model has momentum, and so has the spec.
    """
    optimizers = _optimizers_of(accelerator, model)
    wire = compress_prepared(ACCELERATE, accelerator, model, spec, options, optimizers)
    for optimizer in optimizers:
        check_wire(optimizer, wire)
    if not wire.setup.hooked:
        _call_before_steps(wire, optimizers)
    _attached_to(accelerator).add(wire, wire, accelerator._models)
    return wire


def attach_local(accelerator: Any, model: nn.Module, spec: str, **options: Any) -> LocalSync:
    """Local steps of a model that ``accelerator.prepare`` has returned, with its optimizers.

    The loop stays as it is: the handle is called after each step of the last optimizer. ``accelerator.save_state``
    writes the state of every rank into the same folder, and ``accelerator.load_state`` reads it back.
    ``accelerator.end_training()`` warns if the training ends inside a round, whose steps are then not averaged.
    To train on without local steps, call ``outer.close()`` at the end of a round, where ``outer.inside`` is 0. Then all
    ranks end with the same weights.

    Args:
        accelerator: An `accelerate.Accelerator`.
        model: The prepared model.
        spec: See `gradwire.local`, as for all other options.
        options: All of `gradwire.local`.
    """
    optimizers, attached = _optimizers_of(accelerator, model), _attached_to(accelerator)
    attached.refuse_shared(model, optimizers)
    outer = local_prepared(ACCELERATE, model, optimizers, spec, accelerator.scaler, **options)
    attached.add(outer, outer.wire, accelerator._models)
    if not any(isinstance(one, _LoadedLast) for one in accelerator._custom_objects):
        accelerator.register_for_checkpointing(_LoadedLast(attached))
    return outer


def _before_end(accelerator: Any, work: Callable[[], None]) -> None:
    """Do something when a loop calls ``accelerator.end_training()``, for which Accelerate has no hook."""
    end_training = accelerator.end_training

    def end() -> None:
        work()
        end_training()

    accelerator.end_training = end


def _optimizers_of(accelerator: Any, model: nn.Module) -> list[Optimizer]:
    return optimizers_of(model, [prepared.optimizer for prepared in accelerator._optimizers])


def _call_before_steps(wire: Wire, optimizers: Sequence[Optimizer]) -> None:
    """Have the optimizer call a wire before it steps, where there is no DDP that would."""
    if len(optimizers) != 1:
        raise ValueError(
            f"in one process without DistributedDataParallel, gradients are compressed when the optimizer steps, and "
            f"{len(optimizers)} prepared optimizers step this model; prepare one before attach, or start the script by "
            "torchrun --nproc-per-node 1"
        )

    def call(_: Optimizer, args: Any, kwargs: Any) -> None:
        if kwargs.get("closure", args[1] if len(args) > 1 else None) is not None:
            raise ValueError("optimizer.step(closure) makes gradients after they are compressed; call it without one")
        write_missing(wire.parameters, wire.sync(wire.grads()))

    optimizers[0].register_step_pre_hook(call)
    wire.is_called = True


class _Attached:
    """The handles of one Accelerator, which saves and loads them while their models are prepared.

    The first has its files beside those of the models. Each of the others has a folder in there.
    """

    def __init__(self, accelerator: Any) -> None:
        self._handles: list[tuple[Wire | LocalSync, Tensor]] = []  # with a parameter of the model
        self._loaded_last: list[tuple[LocalSync, Path]] = []
        # The lists of models that hooks are given may be emptied by hooks of others.
        accelerator.register_save_state_pre_hook(lambda models, weights, to: self._save(accelerator._models, to))
        accelerator.register_load_state_pre_hook(lambda models, folder: self._load(accelerator._models, folder))
        _before_end(accelerator, self._warn_inside_rounds)

    def refuse_shared(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Refuse an optimizer that counts the local steps of another model already."""
        mine = {id(p) for p in model.parameters()}
        for handle, p in self._handles:
            if isinstance(handle, LocalSync) and id(p) not in mine and set(handle.inner_optimizers) & set(optimizers):
                raise ValueError(
                    "an optimizer steps two models that take local steps, and each of them counts its own; prepare an "
                    "optimizer for each model"
                )

    def add(self, handle: Wire | LocalSync, wire: Wire, models: Sequence[nn.Module]) -> None:
        """Save and load a handle from now on, in the place of an earlier one of the same model."""
        p, prepared = next(iter(wire.parameters.values())), _parameters(models)
        if id(p) not in prepared:
            raise ValueError(
                f"the Accelerator has not prepared this model, and would not save its {type(handle).__name__}; pass "
                "the model that accelerator.prepare(model) returned"
            )
        kept = [(one, other) for one, other in self._handles if id(other) in prepared and other is not p]
        self._handles = [*kept, (handle, p)]

    def _places(self, models: Iterable[nn.Module], folder: str) -> Iterator[tuple[Wire | LocalSync, Path]]:
        prepared = _parameters(models)
        alive = [handle for handle, p in self._handles if id(p) in prepared]
        for number, handle in enumerate(alive):
            yield handle, Path(folder, f"gradwire-{number}") if number else Path(folder)

    def _save(self, models: Iterable[nn.Module], folder: str) -> None:
        for handle, place in self._places(models, folder):
            save(handle, place)

    def _load(self, models: Iterable[nn.Module], folder: str) -> None:
        self._loaded_last = []
        for handle, place in self._places(models, folder):
            if isinstance(handle, LocalSync):
                self._loaded_last.append((handle, place))
            else:
                load(handle, place)

    def _warn_inside_rounds(self) -> None:
        for handle, _ in self._handles:
            if isinstance(handle, LocalSync):
                warn_inside_round(handle, "outer")

    def load_last(self) -> None:
        """Load the states that go with those of optimizers."""
        while self._loaded_last:  # which keeps no handle that is replaced later
            load(*self._loaded_last.pop(0))


_attached: "WeakKeyDictionary[Any, _Attached]" = WeakKeyDictionary()


def _attached_to(accelerator: Any) -> _Attached:
    if accelerator not in _attached:
        _attached[accelerator] = _Attached(accelerator)
    return _attached[accelerator]


def _parameters(models: Iterable[nn.Module]) -> set[int]:
    """Identities of the parameters of all models."""
    for model in models:
        reshard(model)
    return {id(p) for model in models for p in model.parameters()}


class _LoadedLast:
    """Loads states of local steps after models and optimizers, which Accelerate reads for all ranks from one file."""

    def __init__(self, attached: _Attached) -> None:
        self._attached = attached

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._attached.load_last()


def compress_prepared(
    entry: EntryPoint,
    accelerator: Any,
    model: nn.Module,
    spec: Spec,
    options: Mapping[str, Any],
    optimizers: Sequence[Optimizer],
) -> Wire:
    """`gradwire.compress`, for a model that an Accelerator has wrapped in DDP or sharded, or has to itself."""
    if accelerator.num_processes > 1 and find_ddp(model) is None and not is_sharded(model):
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
