"""`local`: one call after which a model takes local steps."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gradwire.comm.backend import Backend
from gradwire.comm.host_layout import Across
from gradwire.core.renamed import renamed_argument
from gradwire.engine import Rule, Spec
from gradwire.engine.plan import BUCKET_BYTES
from gradwire.exchanges import Exchange
from gradwire.feedback import Feedback
from gradwire.integrations.compress import connect_model
from gradwire.integrations.consistency import errors_on_all_ranks
from gradwire.integrations.ddp import find_ddp
from gradwire.integrations.elastic_place import LOOPBACK, ElasticPlace, elastic_place_of
from gradwire.integrations.entry_point import COMPRESS, steps_locally
from gradwire.integrations.grad_scaler import has_scaler
from gradwire.integrations.local.elastic import ElasticGroup, elastic_method
from gradwire.integrations.local.handle import LocalSync
from gradwire.integrations.model import is_plain, refuse_later, refuse_sparse, refuse_wrapped, trainable
from gradwire.integrations.optimizer_warning import OptimizerWarning
from gradwire.integrations.ownership import refuse_wires, register_local
from gradwire.integrations.setup import Options, Setup
from gradwire.integrations.trainer_warnings import warn_user
from gradwire.local.method import LocalMethod, OuterFactory

Optimizers: TypeAlias = "Optimizer | Sequence[Optimizer]"
_hooks: "WeakKeyDictionary[Optimizer, RemovableHandle]" = WeakKeyDictionary()


@renamed_argument("launch_mb", "bucket_mb")
@steps_locally("model", "optimizer")
def local(
    model: nn.Module,
    optimizer: Optimizers,
    spec: str | LocalMethod,
    codec: "Spec | None" = None,
    *,
    feedback: str | Feedback | None = None,
    exchange: str | Exchange | None = None,
    outer: OuterFactory | None = None,
    outer_device: torch.device | str | None = None,
    uneven: bool = False,
    auto: bool = False,
    granularity: str = "layer",
    rules: Sequence[Rule] = (),
    bundle: str | None = "fp16",
    scaler: torch.amp.GradScaler | None = None,
    process_group: "torch.distributed.ProcessGroup | None" = None,
    seed: int = 0,
    bucket_mb: float = BUCKET_BYTES / 2**20,
    rollback: bool = True,
    across: "Across | torch.distributed.device_mesh.DeviceMesh | None" = None,
    link: Backend | None = None,
    elastic: bool = False,
    timeout: float = 30.0,
    meeting: str | Path | None = None,
    rank: int | None = None,
    world: int | None = None,
    host: str = LOOPBACK,
) -> LocalSync:
    """Take local steps, and agree on weights every H steps; call the returned handle after ``optimizer.step()``.

    Args:
        model: This rank's replica. It starts with the parameters and buffers of rank 0.
        optimizer: The optimizer that steps the model, of any kind, which stays as it is; or a list of several, if each
            steps a part. In the start of a method that has one, its ``step()`` averages gradients first.
        spec: The round: ``"sparseloco(H=5)"``, ``"diloco(H=30)"``, ``"local_sgd(H=8)"``, ...
        codec: How differences are encoded, such as ``"int4"``; by default as in the spec.
        feedback: What happens to the error of the codec; by default the spec's, if that keeps errors, or what the codec
            needs.
        exchange: ``"allgather"``, ``"two_way"``, ...; by default as the codec or the spec needs. The spec's mean over
            senders stays where the codec selects entries.
        outer: Makes the optimizer of the outer weights: ``lambda weights: torch.optim.Adam(weights, 1e-3)``. By default
            SGD with the rate and momentum of the spec.
        outer_device: Where outer weights and their momentum are kept: ``"cpu"`` to spare a GPU; by default with the
            model. Errors stay with the model.
        uneven: Whether ranks take as many steps in a round as their speed allows, H on average, so that all end it at
            about the same time. Differences are weighted by steps, but in a mean over senders.
        auto: Whether H is measured: after two rounds of the spec's H, it is the shortest after which a step takes at
            most 1.1 times its computing, or 30, if that is shorter. ``print`` shows it.
        granularity: As for `compress`; so are the arguments below.
        rules: Exceptions, tried in order before the codec.
        bundle: The codec of 1-D tensors, which are sent together, if the others are compressed.
        scaler: The GradScaler of the loop, if it has one. It may skip the step of one rank alone, so in a start by
            gradients call `average_gradients()` before ``scaler.step(optimizer)``: all ranks then skip it, or none.
        process_group: The group to train over; by default the whole world.
        seed: The seed of all random bits; equal on all ranks.
        bucket_mb: Megabytes of differences that travel together.
        rollback: Keep the memories from before a round until all ranks have committed it.
        across: ``"hosts"``, or the ranks of each host: differences are averaged inside a host, and compressed between
            hosts. The model may then be a `DistributedDataParallel` over the ranks of its host. For a model under
            ``fully_shard``: the dimension of the mesh between replicas, ``mesh["replicate"]``.
        link: A backend that carries messages instead of torch.distributed.
        elastic: Whether rounds continue when workers die or stall, and take them back. It uses its own connections, so
            no process group is needed. A worker that joins takes over the outer weights of a member.
        timeout: Seconds after which a worker that others wait for is dropped, with ``elastic=True``; twice as long as a
            round takes, or more.
        meeting: As for `gossip`, with ``elastic=True``; so are the arguments below.
        rank: Which elastic worker this is; by default RANK of the environment.
        world: How many elastic workers there may be; by default WORLD_SIZE.
        host: The address under which other elastic workers reach this one.

    Returns:
        A handle: ``report()``, ``averaged()``, ``state_dict()``, ``set(...)``, ``off()``, ``close()``.
    """
    place = elastic_place_of(elastic, rank, world, meeting, timeout, host)
    if place is not None:
        options = Options(None, None, granularity, rules, bundle, None, seed, bucket_mb, rollback)
        if link is not None or process_group is not None or across is not None or uneven or auto:
            raise ValueError(
                "elastic=True opens connections of its own, to workers of one rank that take H steps each; leave link, "
                "process_group, across, uneven and auto out"
            )
        return _local_elastic(
            model, optimizer, COMPRESS.rounds(spec, codec, feedback, exchange), options, place, outer, outer_device
        )
    replicas, backend = connect_model(model, link, process_group, across)
    ddp = find_ddp(model)
    with errors_on_all_ranks(backend):
        if replicas is not None and (process_group is not None or link is not None or uneven):
            raise ValueError(
                "the ranks of a sharded model are those of its mesh, and take equally many steps; leave "
                "process_group=, link= and uneven= out"
            )
        if ddp is not None and 1 < ddp.process_group.size() == backend.world:
            raise ValueError(
                "DistributedDataParallel averages gradients over all ranks; pass the module inside of it, and call "
                "that module in the loop, without DDP, which would average in every step"
            )
        chosen = COMPRESS.rounds(spec, codec, feedback, exchange)
        inner = model if ddp is None else ddp.module
        options = Options(None, None, granularity, rules, bundle, scaler, seed, bucket_mb, rollback)
        setup = setup_of(inner, backend, options, sharded=replicas is not None)
        refuse_wires(setup.parameters, backend.world)
        optimizers = checked_optimizers(optimizer, chosen, inner, warn=backend.rank == 0)
    handle = LocalSync(inner, setup, chosen, outer, outer_device, uneven, measured=auto)
    if replicas is not None:
        replicas.take_over(backend)
        handle.closing.callback(replicas.give_back)
    hook_steps(handle, optimizers, LocalSync.average_gradients if scaler is None else require_averaged)
    register_local(handle, setup.parameters, backend.world)
    return handle


def _local_elastic(
    model: nn.Module,
    optimizer: Optimizers,
    chosen: LocalMethod,
    options: Options,
    place: ElasticPlace,
    outer: OuterFactory | None,
    outer_device: torch.device | str | None,
) -> LocalSync:
    refuse_wrapped(model)
    refuse_sparse(model)
    chosen, parameters = elastic_method(chosen, options), trainable(model.named_parameters())
    optimizers = checked_optimizers(optimizer, chosen, model, warn=place.rank == 0)
    refuse_wires(parameters, place.world)
    numbers = sum(x.numel() for x in (*model.parameters(), *model.buffers()))
    shapes = {name: tuple(p.shape) for name, p in parameters.items()}
    group = ElasticGroup(place, f"{chosen}; {options}; {shapes}", numbers)
    try:
        setup = Setup(parameters, group.link, options, check_model=_later(model), mixed=True)
        handle = LocalSync(model, setup, chosen, outer, outer_device, group=group)
        group.begin(handle)
    except BaseException:
        group.mesh.close()
        raise
    hook_steps(handle, optimizers, LocalSync.average_gradients)
    register_local(handle, parameters, place.world)
    return handle


def checked_optimizers(given: Optimizers, chosen: LocalMethod, model: nn.Module, warn: bool = True) -> list[Optimizer]:
    """The optimizers of one worker's model; warns, if it is to, where the method is meant for others."""
    optimizers = [given] if isinstance(given, Optimizer) else list(given)
    for one in optimizers:
        if not isinstance(one, Optimizer):
            raise TypeError(f"{type(one).__name__} is no optimizer of torch; pass the one that steps the model")
    _check_stepped(optimizers, model, chosen.start)
    kinds = [type(one).__name__ for one in optimizers]
    if warn and chosen.inner and not any(chosen.inner.lower() in kind.lower() for kind in kinds):
        warn_user(
            f"this method is meant for inner steps of {chosen.inner}, not of {', '.join(kinds)}; pass "
            f"[torch.optim.{chosen.inner}(matrices), torch.optim.AdamW(others)], or use diloco",
            OptimizerWarning,
        )
    return optimizers


def _check_stepped(optimizers: Sequence[Optimizer], model: nn.Module, start: int) -> None:
    """Refuse optimizers of another model, and a start in which one that was not passed steps without the mean."""
    names, stepped = {id(p): name for name, p in model.named_parameters() if p.requires_grad}, set[int]()
    for one in optimizers:
        mine = {id(p) for group in one.param_groups for p in group["params"]} & names.keys()
        if not mine:
            raise ValueError(
                f"{type(one).__name__} steps no parameter of this model; pass one that was made from "
                "model.parameters(), after fully_shard if that was called"
            )
        stepped |= mine
    left = [name for p, name in names.items() if p not in stepped]
    if start and optimizers and left:
        raise ValueError(
            f"in the start, optimizers average gradients before they step, and {left[0]!r} is stepped by none of those "
            "that were passed; pass all of them as a list, or freeze it by requires_grad_(False)"
        )


def hook_steps(handle: LocalSync, optimizers: Sequence[Optimizer], before_step: Callable[[LocalSync], None]) -> None:
    """Have optimizers call something before their steps, and refuse two steps of one without a call of the handle."""
    for number, optimizer in enumerate(optimizers):

        def note(optimizer: Optimizer, args: Any, kwargs: Any, number: int = number) -> Any:
            _check_step(handle, number)
            if before_step is LocalSync.average_gradients:  # no scaler was given
                _refuse_scaler(handle, optimizer)
            handle.unfinished.add(number)
            closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
            if closure is not None:  # gradients are there when it has run
                return args[:1], {**kwargs, "closure": _followed(closure, before_step, handle)}
            before_step(handle)
            return None

        if optimizer in _hooks:
            _hooks[optimizer].remove()  # of a handle that this one replaces
        _hooks[optimizer] = optimizer.register_step_pre_hook(note)
        handle.closing.callback(_hooks[optimizer].remove)


def require_averaged(handle: LocalSync) -> None:
    """Refuse a step of the start whose gradients are those of one rank alone."""
    handle.start.require_averaged(handle.steps)


def _check_step(handle: LocalSync, number: int) -> None:
    """Refuse a second step without a call of the handle, and weights that were loaded after it was made."""
    if number in handle.unfinished:
        raise RuntimeError(
            "optimizer.step() was called a second time, and outer() was not called after the first; call the handle "
            "that gradwire.local returned once after every step"
        )
    if not (handle.steps or handle.method.start or handle.unfinished) and handle.outer.differs():
        raise RuntimeError(
            "the model's weights have changed since gradwire.local was called, and the first round would take that "
            "back; load weights before gradwire.local, or a state of the handle by gradwire.load(outer, folder)"
        )


def _refuse_scaler(handle: LocalSync, optimizer: Optimizer) -> None:
    """In the first step, refuse a GradScaler that a start by gradients was not given: it would find zeros."""
    if handle.start.wire is not None and not handle.start.steps and has_scaler(optimizer):
        raise ValueError(
            f"a GradScaler steps {type(optimizer).__name__}, and the start does not know it, so the scaler would "
            "never back off; write gradwire.local(..., scaler=scaler)"
        )


def _followed(closure: Callable[[], Any], then: Callable[[LocalSync], None], handle: LocalSync) -> Callable[[], Any]:
    """A closure after whose first run something is called; in the start, a second run is refused."""
    runs = count()

    def run() -> Any:
        if next(runs) and handle.start.sends(handle.steps):
            raise RuntimeError(
                "in the start gradients are averaged once a step, and this optimizer runs its closure again, which "
                "makes others; leave start= out, or take an optimizer that runs it once (for LBFGS, max_iter=1)"
            )
        loss = closure()
        then(handle)
        return loss

    return run


def setup_of(model: nn.Module, backend: Backend, options: Options, sharded: bool = False) -> Setup:
    """What the plans of a model depend on; its parameters and buffers start as rank 0's, or as the first replica's."""
    refuse_wrapped(model)
    refuse_sparse(model)
    shared = dict((*model.named_parameters(), *model.named_buffers()))
    accepts = (lambda _: True) if sharded else is_plain
    parameters = trainable(model.named_parameters(), accepts)
    later = _later(model, sharded)
    return Setup(parameters, backend, options, shared=shared, check_model=later, sharded=sharded, mixed=not sharded)


def _later(model: nn.Module, sharded: bool = False) -> Callable[[], None]:
    """Refuse, at the next round, parameters that begin to train: no message would have them."""
    return partial(refuse_later, model, {id(p) for p in model.parameters() if p.requires_grad}, sharded)
