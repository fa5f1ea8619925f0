"""`compress`: one call after which a model sends few bytes."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradwire.comm.backend import Backend
from gradwire.comm.host_layout import Across
from gradwire.core.renamed import renamed_argument
from gradwire.engine import Rule, Spec
from gradwire.engine.plan import BUCKET_BYTES
from gradwire.exchanges import Exchange
from gradwire.feedback import Feedback
from gradwire.integrations.adamw_checks import check_optimizer
from gradwire.integrations.adamw_moments import attach_optimizer
from gradwire.integrations.auto import described_link
from gradwire.integrations.consistency import errors_on_all_ranks, find_backend
from gradwire.integrations.ddp import find_ddp, find_replicated, make_wire, refuse_replicated
from gradwire.integrations.entry_point import COMPRESS, EntryPoint
from gradwire.integrations.model import is_sharded, is_whole, refuse_later, refuse_sparse, refuse_wrapped, trainable
from gradwire.integrations.optimizer import own_gradients
from gradwire.integrations.ownership import refuse_averaged, refuse_local
from gradwire.integrations.setup import Options, Setup, check_options
from gradwire.integrations.wire import Wire

if TYPE_CHECKING:
    from gradwire.integrations.sharded.replicas import Replicas


@renamed_argument("launch_mb", "bucket_mb")
def compress(
    model: nn.Module,
    spec: Spec,
    *,
    optimizer: Optimizer | None = None,
    feedback: str | Feedback | None = None,
    exchange: str | Exchange | None = None,
    granularity: str = "layer",
    rules: Sequence[Rule] = (),
    bundle: str | None = "fp16",
    scaler: torch.amp.GradScaler | None = None,
    process_group: dist.ProcessGroup | None = None,
    seed: int = 0,
    bucket_mb: float = BUCKET_BYTES / 2**20,
    rollback: bool = True,
    across: Across | DeviceMesh | None = None,
    link: Backend | str | None = None,
) -> Wire:
    """Compress a model's gradients.

    A `DistributedDataParallel` model gets a communication hook and needs no further call. Any other model gets the
    parameters and buffers of rank 0, and its loop calls the returned wire between ``backward()`` and ``step()``.

    Momentum correction, as in ``dgc``, applies momentum before compression. The optimizer must not apply it again: use
    `gradwire.SGD`, or one without momentum. Any other is refused when it first steps.

    Args:
        model: The model, wrapped in DDP or not.
        spec: A codec such as ``"topk(0.01) | sign"``, a preset such as ``"dgc(0.001)"``, or a table of codecs by step.
            ``"auto"`` measures the first steps, takes a spec that is faster than dense training, if there is one, and
            returns to dense if it is not.
        optimizer: The optimizer that steps the model. Methods such as ``"onebit_adam"`` need it, and it must be a
            `gradwire.AdamW`.
        feedback: ``"none"``, ``"residual"``, ...; by default what the spec needs.
        exchange: ``"allgather"``, ``"two_way"``, ...; by default the one that fits and sends least.
        granularity: What the codec sees as one vector: each ``"layer"``, a ``"bucket"``, or the whole ``"model"``.
        rules: Exceptions, tried in order before the spec.
        bundle: The codec of 1-D tensors (biases, norms), which travel together; None treats them like the others.
        scaler: The loop's GradScaler, if it has one.
        process_group: The group to train over; by default the whole world, or DDP's.
        seed: The seed of all random bits; equal on all ranks.
        bucket_mb: Megabytes of gradients that travel together under DDP.
        rollback: Keep the memories from before a step until all ranks have committed it, so that a gradient that is not
            finite skips the step. False lets fused kernels change them in place: half the memory, the same bits, but
            such a gradient is an error then, unless there is a ``scaler``.
        across: ``"hosts"`` compresses only between hosts, which are found from the environment that torchrun, mpirun
            or srun sets, and averages densely inside; so does a list of the ranks of each host, ``[[0, 1], [2, 3]]``.
            For a model under ``fully_shard``: the dimension of the mesh between replicas, ``mesh["replicate"]``.
        link: A backend that carries messages instead of torch.distributed. With ``"auto"``: the rate and delay of the
            link between hosts, as in ``"100mbit,5ms"``; by default they are measured in the first steps.

    Returns:
        A handle: ``report()``, ``state_dict()``, ``set(...)``, ``off()``; callable in plain loops.
    """
    return compress_from(COMPRESS, **locals())  # all of the arguments


@renamed_argument("launch_mb", "bucket_mb")
def compress_from(
    entry: EntryPoint,
    model: nn.Module,
    spec: Spec,
    *,
    optimizer: Optimizer | None = None,
    process_group: dist.ProcessGroup | None = None,
    across: Across | DeviceMesh | None = None,
    link: Backend | str | None = None,
    **others: Any,
) -> Wire:
    """`compress`, for users who called something else; errors name the remedies of that call.

    Args:
        entry: What the user called.
        model: As for `compress`; so are the arguments below.
        spec: See there.
        optimizer: See there.
        process_group: See there.
        across: See there.
        link: See there.
        others: The options of `Options`.
    """
    check_options(entry.name, others)
    wrapper, replicated = find_ddp(model), find_replicated(model)
    ddp, inner = wrapper or replicated, model if wrapper is None else wrapper.module
    replicas, backend = connect_model(model, link, process_group if ddp is None else ddp.process_group, across)
    ignored = () if ddp is None else _ignored(ddp, inner)
    with errors_on_all_ranks(backend):
        if not isinstance(model, nn.Module):
            raise TypeError(f"compress takes the model itself, not {type(model).__name__}; pass an nn.Module")
        options = Options(**others)
        entry.refuse_local_steps(spec)
        refuse_wrapped(inner)
        if replicas is not None and (process_group is not None or isinstance(link, Backend)):
            raise ValueError("a sharded model is averaged over its own mesh; leave process_group= and link= out")
        if replicas is None and replicated is None:
            refuse_replicated(inner)
        refuse_sparse(inner)
        named = [(name, p) for name, p in inner.named_parameters() if name not in ignored]
        parameters = trainable(named, is_whole if replicas is None else lambda _: True)
        if ddp is None:
            refuse_averaged(parameters)
        refuse_local(parameters, backend.world)
        described = described_link(spec, link, options)
    shared = {} if ddp is not None else dict((*inner.named_parameters(), *inner.named_buffers()))
    fits_optimizer = partial(check_optimizer, optimizer, parameters, entry)
    known = {id(p) for name, p in inner.named_parameters() if p.requires_grad or name in ignored}
    sharded = replicas is not None
    check_model = partial(refuse_later, inner, known, sharded=sharded)
    hooked = ddp is not None or sharded
    setup = Setup(parameters, backend, options, hooked, shared, fits_optimizer, check_model, sharded=sharded)
    setup.entry = entry
    if replicas is not None:
        setup.reduced_last = replicas.reduced_last
    wire = make_wire(setup, spec, described, ddp)
    attach_optimizer(wire, optimizer)
    if replicas is not None:
        replicas.attach(wire, inner)
    own_gradients(wire)
    return wire


def _ignored(ddp: DistributedDataParallel, model: nn.Module) -> set[str]:
    """The names of parameters that a DistributedDataParallel does not average."""
    averaged = {id(p) for name, p in ddp.module.named_parameters() if name not in ddp.parameters_to_ignore}
    return {name for name, p in model.named_parameters() if id(p) not in averaged}


def connect_model(
    model: nn.Module, link: Backend | str | None, group: dist.ProcessGroup | None, across: Across | DeviceMesh | None
) -> "tuple[Replicas | None, Backend]":
    """The replicas of a model, if it is sharded, and what carries messages. All ranks must ask for it."""
    if isinstance(model, nn.Module) and is_sharded(model):
        from gradwire.integrations.sharded.replicas import find_replicas  # which imports FSDP, and that takes long

        replicas = find_replicas(model, across)
        if replicas is not None:
            return replicas, replicas.connect()
    elif isinstance(across, DeviceMesh):
        raise ValueError(
            f"across={across} is for models under fully_shard, and no parameter is sharded; pass "
            "process_group=mesh['replicate'].get_group() instead"
        )
    assert not isinstance(across, DeviceMesh)  # of which there are replicas
    return None, find_backend(link, group, across)
