"""`local`: one call after which a model takes local steps."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gradwire.comm.backend import Backend
from gradwire.comm.host_layout import Across
from gradwire.engine.method import Spec
from gradwire.engine.plan import LAUNCH_BYTES, Rule
from gradwire.exchanges import Exchange
from gradwire.feedback import Feedback
from gradwire.integrations.consistency import errors_on_all_ranks
from gradwire.integrations.ddp import find_ddp
from gradwire.integrations.host_discovery import find_backend
from gradwire.integrations.local.handle import LocalSync
from gradwire.integrations.model import refuse_sparse, refuse_wrapped, trainable
from gradwire.integrations.setup import Options, Setup
from gradwire.local.method import LocalMethod, OuterFactory, local_method


def local(
    model: nn.Module,
    optimizer: Optimizer,
    spec: str | LocalMethod,
    codec: "Spec | None" = None,
    *,
    feedback: str | Feedback | None = None,
    exchange: str | Exchange | None = None,
    outer: OuterFactory | None = None,
    granularity: str = "layer",
    rules: Sequence[Rule] = (),
    bundle: str | None = "fp16",
    process_group: "torch.distributed.ProcessGroup | None" = None,
    seed: int = 0,
    launch_mb: float = LAUNCH_BYTES / 2**20,
    rollback: bool = True,
    across: Across | None = None,
    link: Backend | None = None,
) -> LocalSync:
    """Take local steps, and agree on weights every H steps; call the returned handle after ``optimizer.step()``.

    Args:
        model: This rank's replica. It starts with the parameters and buffers of rank 0.
        optimizer: That steps the model: any, and it is left alone. In the start of a method that has one, its
            ``step()`` averages gradients first.
        spec: The round: ``"sparseloco(H=5)"``, ``"diloco(H=30)"``, ``"local_sgd(H=8)"``, ...
        codec: How differences are encoded, such as ``"int4"``; by default as the spec says.
        feedback: What happens to the error of the codec; by default what the codec or the spec needs.
        exchange: ``"allgather"``, ``"two_way"``, ...; by default as the codec or the spec needs.
        outer: Makes the optimizer of the outer weights: ``lambda weights: torch.optim.Adam(weights, 1e-3)``. By default
            SGD with the rate and momentum of the spec.
        granularity: As for `compress`; so are the arguments below.
        rules: Exceptions, tried in order before the codec.
        bundle: The codec of 1-D tensors, which travel together, where the others are compressed.
        process_group: The group to train over; by default the whole world.
        seed: Of all random bits; equal on all ranks.
        launch_mb: Megabytes of differences that travel together.
        rollback: Keep the memories of before a round until all ranks have agreed on it.
        across: ``"hosts"``, or the ranks of each host: differences are averaged inside a host, and compressed between
            hosts. The model may then be a `DistributedDataParallel` over the ranks of its host.
        link: What moves the bytes, if not torch.distributed.

    Returns:
        A handle: ``report()``, ``averaged()``, ``state_dict()``, ``set(...)``, ``off()``.
    """
    backend = find_backend(link, process_group, across)
    ddp = find_ddp(model)
    with errors_on_all_ranks(backend):
        if ddp is not None and 1 < ddp.process_group.size() == backend.world:
            raise ValueError("DistributedDataParallel averages gradients over all ranks; pass the module inside of it")
        chosen = local_method(spec, codec, feedback, exchange)
        inner = model if ddp is None else ddp.module
        setup = set_up(inner, backend, Options(None, None, granularity, rules, bundle, None, seed, launch_mb, rollback))
    handle = LocalSync(inner, setup, chosen, outer)

    def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        handle.average_gradients()

    if chosen.start:
        optimizer.register_step_pre_hook(before_step)
    return handle


def set_up(model: nn.Module, backend: Backend, options: Options) -> Setup:
    """What the plans of a model depend on; its parameters and buffers start as rank 0's."""
    refuse_wrapped(model)
    refuse_sparse(model)
    shared = dict((*model.named_parameters(), *model.named_buffers()))
    return Setup(trainable(model.named_parameters()), backend, options, shared=shared)
