"""The user's model: which parameters take part, under which names."""

import sys
from collections.abc import Callable, Container, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

_SHARDED = (
    "is sharded: every rank has another part of it, and means over ranks would mix them up; use "
    "DistributedDataParallel, or no wrapper, or, to compress between replicas of sharded models, "
    "fully_shard(model, mesh=mesh['shard']) and across=mesh['replicate']"
)
_LATER = (
    "the parameter {!r} began to train after gradwire was attached, so it is not averaged with other ranks; attach "
    "when all parameters that train are in place and have requires_grad=True"
)


def is_plain(x: Tensor) -> bool:
    """Whether a tensor is no DTensor."""
    return not hasattr(x, "full_tensor")


def is_whole(x: Tensor) -> bool:
    """Whether this rank has all of a tensor: it is no DTensor, or one that is replicated."""
    return all(placement.is_replicate() for placement in getattr(x, "placements", ()))


def trainable(
    named: Iterable[tuple[str, nn.Parameter]], accepts: Callable[[Tensor], bool] = is_plain
) -> dict[str, nn.Parameter]:
    """Parameters that require gradients, by the names that the module gives them before torch.compile.

    Args:
        named: Parameters, by name.
        accepts: Tells parameters that can be compressed from others, which are sharded.

    Raises:
        ValueError: There is none, or one whose gradient cannot be compressed.
    """
    chosen = {}
    for name, parameter in named:
        name = name.replace("_orig_mod.", "")  # what torch.compile puts before a name
        if parameter.requires_grad:
            _check(name, parameter, accepts)
            chosen[name] = parameter
    if not chosen:
        raise ValueError("there is no trainable parameter to synchronize; pass a model with requires_grad=True ones")
    return chosen


def local_part(x: Any) -> Tensor:
    """What this rank has of a tensor: all of it, but of a DTensor."""
    if not hasattr(x, "to_local"):
        whole: Tensor = x
        return whole
    if any(placement.is_partial() for placement in x.placements):
        raise ValueError("a gradient is a DTensor of partial sums; redistribute it to Replicate() first")
    with torch.no_grad():
        part: Tensor = x.to_local()
    return part


def own_gradient(p: nn.Parameter) -> Tensor | None:
    """What this rank has of a parameter's gradient. The update is written there, so each entry needs its own place."""
    if p.grad is None:
        return None
    if p.grad.layout == torch.strided and 0 in p.grad.stride():  # expanded, as torch.autograd.grad may return it
        p.grad = p.grad.clone(memory_format=torch.contiguous_format)
    return local_part(p.grad)


def reshard(model: nn.Module) -> None:
    """Have FSDP forget parameters that it has gathered: they would hide what is written to the shards."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # where it was not imported, nothing is sharded
    for module in model.modules():
        if fsdp is not None and isinstance(module, fsdp.FSDPModule):
            module.reshard()


def is_sharded(model: nn.Module) -> bool:
    """Whether a parameter is a DTensor, also after a forward pass, whose end leaves the outermost ones gathered."""
    reshard(model)
    return not all(map(is_plain, model.parameters()))


def optimizers_of(model: nn.Module, optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    """Those that step parameters of a model."""
    reshard(model)
    mine = {id(p) for p in model.parameters()}
    return [one for one in optimizers if any(id(p) in mine for group in one.param_groups for p in group["params"])]


def like(p: nn.Parameter, part: Tensor) -> Tensor:
    """A gradient of a parameter, made of what this rank has of it."""
    return distributed_as(p, part.to(device=p.device, dtype=p.dtype))


def distributed_as(p: Any, part: Tensor) -> Tensor:
    """A tensor distributed as another one is, made of what this rank has of it."""
    if not hasattr(p, "to_local"):
        return part
    made: Tensor = type(p).from_local(
        part, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    )
    return made


def refuse_later(model: nn.Module, known: Container[int], sharded: bool = False) -> None:
    """Refuse a parameter that began to train after gradwire was attached: no rank would send what concerns it.

    Args:
        model: As it is now.
        known: Identities of the parameters at attach.
        sharded: Whether plain tensors are parameters that FSDP has gathered for a while.
    """
    modules: list[nn.Module] = [model]
    for module in modules:  # which grows; this takes a quarter of the time of named_parameters()
        modules += [child for child in module._modules.values() if child is not None]
        for p in module._parameters.values():
            if p is not None and p.requires_grad and id(p) not in known and sharded <= hasattr(p, "to_local"):
                name = next(name for name, other in model.named_parameters() if other is p)
                raise RuntimeError(_LATER.format(name.replace("_orig_mod.", "")))


def refuse_unfrozen(named: Iterable[tuple[str, nn.Parameter]], known: Container[int]) -> None:
    """The same for a list of parameters."""
    for name, p in named:
        if p.requires_grad and id(p) not in known:
            raise RuntimeError(_LATER.format(name))


def refuse_sparse(model: nn.Module) -> None:
    """Refuse sparse embedding gradients at once: they would fail at the first step, on one rank after the other."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ValueError(
                f"the embedding {name!r} makes sparse gradients, and only dense ones are compressed; "
                "build it with sparse=False"
            )


def refuse_wrapped(model: nn.Module) -> None:
    """Refuse modules that something else averages or shards: replicas must be complete, and averaged here only."""
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            raise ValueError(
                f"{name!r} in the model is a DistributedDataParallel, which averages its gradients by itself; pass "
                "that module to gradwire, or each of them if there are several"
            )
        if type(module).__name__ == "FullyShardedDataParallel":
            raise ValueError(f"the module {name!r} {_SHARDED}")


def refuse_join(ddp: DistributedDataParallel | None) -> None:
    """Refuse a pass inside of ``join()``: ranks whose batches have ended would call the hook outside of any pass."""
    if ddp is None or ddp.process_group.size() == 1:
        return
    if ddp._join_config.enable and not ddp._join_config.throw_on_early_termination:
        raise RuntimeError(
            "gradients are not compressed inside of join(), where ranks without batches take part in the steps of "
            "others; give all ranks equally many batches, as DistributedSampler does, or end with the first of them: "
            "join(throw_on_early_termination=True)"
        )


def _check(name: str, parameter: nn.Parameter, accepts: Callable[[Tensor], bool]) -> None:
    # A DTensor, or marked by FSDP: an optimizer is given parameters without their module.
    if hasattr(parameter, "_fsdp_flattened") or not accepts(parameter):
        raise ValueError(f"the parameter {name!r} {_SHARDED}")
    if parameter.is_complex():
        raise ValueError(f"the parameter {name!r} is complex; hold its real and imaginary parts in two parameters")
    if not parameter.is_floating_point():
        raise ValueError(f"the parameter {name!r} is {parameter.dtype}; only floating-point gradients are compressed")
