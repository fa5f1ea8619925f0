"""Lightning: a callback that compresses the gradients of what a Trainer fits.

Lightning registers no communication hook on a CPU. So the callback passes the model that the strategy has wrapped in
DistributedDataParallel to `gradwire.compress`. On a single device there is no such model, and the wire is called where
Lightning is about to step.
"""

import warnings
from typing import TYPE_CHECKING, Any

from gradwire.core.renamed import renamed
from gradwire.engine import Spec
from gradwire.integrations.checkpoint import gather_states
from gradwire.integrations.compress import compress_from
from gradwire.integrations.ddp import find_ddp
from gradwire.integrations.entry_point import LIGHTNING
from gradwire.integrations.local.handle import LocalSync
from gradwire.integrations.local.trainers import (
    local_prepared,
    stop_averaging,
    warn_inside_round,
    warn_of_last_steps,
)
from gradwire.integrations.model import is_sharded, optimizers_of
from gradwire.integrations.optimizer import check_wire
from gradwire.integrations.ownership import release
from gradwire.integrations.trainer_warnings import warn_of_start
from gradwire.integrations.wire import Wire

if TYPE_CHECKING:
    Callback = object
    GradientAccumulationScheduler = object
else:
    try:
        from lightning.pytorch import Callback
        from lightning.pytorch.callbacks import GradientAccumulationScheduler
    except ImportError:
        from pytorch_lightning import Callback
        from pytorch_lightning.callbacks import GradientAccumulationScheduler

KEY = "gradwire"  # of the states in a checkpoint


class LightningCompression(Callback):
    """Compresses gradients while a Trainer fits; pass it in ``Trainer(callbacks=[...])``.

    A checkpoint holds the memories of all ranks, and ``fit(ckpt_path=...)`` continues with them, also on another number
    of ranks. At the end of every epoch, loggers get the bytes sent.

    Attributes:
        wire: The handle, from the start of a fit on; ``wire.report()`` and the rest.
    """

    def __init__(self, spec: Spec, **options: Any) -> None:
        """The options are those of `gradwire.compress`, except the scaler, which is Lightning's own."""
        self.spec, self.options = spec, options
        self.wire: Wire | None = None
        self._called = False  # by us, not by DDP or by hooks of a sharded model
        self._saved: list[dict[str, Any]] = []

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        model = trainer.strategy.model
        self._called = find_ddp(model) is None and not is_sharded(model)
        if self._called:
            _refuse_others(trainer)
        scaler = None if self._called else getattr(trainer.precision_plugin, "scaler", None)
        optimizer = next(iter(optimizers_of(model, trainer.optimizers)), None)
        self._release()
        self.wire = None
        options = {"scaler": scaler, "optimizer": optimizer, **self.options}
        self.wire = compress_from(LIGHTNING, model, self.spec, **options)
        for optimizer in trainer.optimizers:
            check_wire(optimizer, self.wire)
        if self._saved:
            self.wire.load_state_dict(self._saved)
            self._saved = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self.wire is not None and self.wire.link.rank == 0:
            warn_of_start(self.wire.engine.full_plan.start, _max_steps(trainer), self.spec)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        if not pl_module.automatic_optimization:
            return  # the module says itself which passes are reduced
        if self.wire is not None and self.wire.setup.sharded:
            # Lightning has FSDP reduce every batch that adds up to a step; the last one is enough.
            is_last = not trainer.fit_loop._should_accumulate()
            for module in pl_module.modules():
                if hasattr(module, "set_requires_gradient_sync"):
                    module.set_requires_gradient_sync(is_last, recurse=False)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self._called and self.wire is not None:
            self.wire()  # a loss scale is divided out already, and clipping comes after

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        assert self.wire is not None
        report = self.wire.report()
        _log(trainer, report.sent, report.payload_ratio, skipped=float(report.skipped))

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self._release()

    def _release(self) -> None:
        """Let the module be fitted again, also with another callback."""
        if self.wire is not None:
            release(self.wire)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if self.wire is not None:
            checkpoint[KEY] = gather_states(self.wire)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if not trainer.training:
            return
        self._saved = checkpoint.get(KEY, [])
        if not self._saved:
            warnings.warn("the checkpoint was saved without compression, whose memories begin empty", stacklevel=2)


class LightningLocalSteps(Callback):
    """Local steps while a Trainer fits; pass it in ``Trainer(strategy="ddp", callbacks=[...])``.

    A checkpoint holds the state of all ranks, and ``fit(ckpt_path=...)`` continues with it. A fit that ends inside a
    round is warned of: its last steps are not averaged.

    Attributes:
        outer: The handle, from the start of a fit on; ``outer.report()`` and the rest.
    """

    def __init__(self, spec: str, **options: Any) -> None:
        """The options are those of `gradwire.local`."""
        self.spec, self.options = spec, options
        self.outer: LocalSync | None = None
        self._saved: list[dict[str, Any]] = []

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        optimizers = [getattr(one, "optimizer", one) for one in trainer.optimizers]
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.outer = local_prepared(LIGHTNING, trainer.strategy.model, optimizers, self.spec, scaler, **self.options)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        assert self.outer is not None
        if self._saved:  # after Lightning has loaded the optimizers of one rank
            self.outer.load_state_dict(self._saved)
            self._saved = []
        warn_of_last_steps(self.outer, self.spec, _max_steps(trainer))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        # Under manual optimization, Lightning has DDP average again after each training_step.
        stop_averaging(trainer.strategy.model)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self.outer is not None:
            warn_inside_round(self.outer, "callback.outer")

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        if self.outer is not None:
            self.outer.close(keep_weights=True)  # let the module be fitted again, also with another callback

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        assert self.outer is not None
        report = self.outer.report()
        _log(trainer, report.sent, report.payload_ratio)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if self.outer is not None:
            checkpoint[KEY] = gather_states(self.outer)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if not trainer.training:
            return
        self._saved = checkpoint.get(KEY, [])
        if not self._saved:
            warnings.warn(
                "the checkpoint was saved without local steps, whose outer weights are those of the model, and whose "
                "momentum and errors begin empty",
                stacklevel=2,
            )


def _max_steps(trainer: Any) -> float:
    """After how many steps of an optimizer a fit ends; -1 or infinite, if that is not known."""
    # Of several optimizers, Lightning counts all steps. How many batches a scheduler adds up to one, it does not know.
    scheduled = any(isinstance(one, GradientAccumulationScheduler) for one in trainer.callbacks)
    return -1 if scheduled or len(trainer.optimizers) > 1 else trainer.estimated_stepping_batches


def _log(trainer: Any, sent: float, ratio: float, **more: float) -> None:
    metrics = {"sent_mb": sent / 1e6, "payload_ratio": ratio, **more}
    for logger in trainer.loggers:
        logger.log_metrics({f"{KEY}/{name}": x for name, x in metrics.items()}, trainer.global_step)


def _refuse_others(trainer: Any) -> None:
    if trainer.world_size > 1:
        raise ValueError(
            f"{type(trainer.strategy).__name__} does not wrap the model in DistributedDataParallel, whose gradients "
            "are compressed; use Trainer(strategy='ddp'), or shard it with replicas in configure_model"
        )
    if len(trainer.optimizers) > 1:
        raise ValueError(
            f"on a single device, gradients are compressed before the optimizer steps, and here are "
            f"{len(trainer.optimizers)} optimizers; train with one, or on several devices with strategy='ddp'"
        )


__getattr__ = renamed({"Compression": "LightningCompression"}, globals())
