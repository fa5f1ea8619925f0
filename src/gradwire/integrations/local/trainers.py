"""Local steps of models that a trainer has prepared: its DistributedDataParallel averages no more."""

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from gradwire.integrations.ddp import find_ddp
from gradwire.integrations.local.attach import local
from gradwire.integrations.local.handle import LocalSync
from gradwire.local.method import LocalMethod


def local_prepared(
    model: nn.Module, optimizers: Sequence[Optimizer], spec: str | LocalMethod, **options: Any
) -> LocalSync:
    """`local`, for a model that may be in a DistributedDataParallel over all ranks.

    The handle is called after each step of the last optimizer, and saves the states of all of them.
    """
    ddp = find_ddp(model)
    if ddp is not None:
        # As inside of its no_sync(), for good.
        ddp.require_backward_grad_sync = ddp.require_forward_param_sync = ddp.broadcast_buffers = False
    outer = local(model if ddp is None else ddp.module, optimizers, spec, **options)
    outer.inner_optimizers = list(optimizers)
    optimizers[-1].register_step_post_hook(lambda *step: outer())
    return outer
