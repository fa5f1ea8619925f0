"""What is read of FSDP2's own objects. Some of it is private to torch, and may be absent in other versions."""

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from gradwire.comm.liveness import PeerLostError
from gradwire.comm.torch_backend import subgroup

_COLLECTIVE_METHODS = ("unshard", "wait_for_unshard", "post_backward", "finalize_backward")  # of a group of parameters

_taken_over: "WeakKeyDictionary[Any, dist.ProcessGroup]" = WeakKeyDictionary()  # FSDP's own groups of replicas


def param_groups(model: nn.Module) -> list[Any]:
    """The groups in which FSDP gathers and reduces parameters."""
    states = {id(state): state for module in model.modules() if (state := _state(module)) is not None}
    return [group for state in states.values() for group in _groups_of(state)]


def names_reduced_last(model: nn.Module) -> frozenset[str]:
    """Names of the parameters that FSDP reduces when backward is over: those that no inner module is sharded with."""
    inner = getattr(model, "_orig_mod", model)
    state = _state(inner)
    groups = [] if state is None else _groups_of(state)
    mine = {id(x.sharded_param) for group in groups for x in group.fsdp_params}
    return frozenset(name.replace("_orig_mod.", "") for name, p in inner.named_parameters() if id(p) in mine)


def _state(module: nn.Module) -> Any:
    return module._get_fsdp_state() if isinstance(module, FSDPModule) else None


def _groups_of(state: Any) -> list[Any]:
    several = getattr(state, "_fsdp_param_groups", None)  # since torch 2.12
    return [group for group in ([state._fsdp_param_group] if several is None else several) if group is not None]


def native_group(groups: Iterable[Any]) -> dist.ProcessGroup | None:
    """The group over which FSDP averages replicas by itself, as under a mesh of two dimensions.

    Raises:
        ValueError: Parts of the model have different ones.
    """
    natives = [native for group in groups if (native := _native_group_of(group)) is not None]
    if len({tuple(dist.get_process_group_ranks(native)) for native in natives}) > 1:
        raise ValueError("parts of the model are replicated over different ranks; use one mesh for all of them")
    return natives[0] if natives else None


def _native_group_of(group: Any) -> dist.ProcessGroup | None:
    return _taken_over.get(group) or getattr(group.mesh_info, "replicate_process_group", None)


def take_over_averaging(groups: Iterable[Any]) -> None:
    """Make FSDP average over groups of one rank, which changes nothing, where it averages replicas by itself.

    Raises:
        ValueError: This version of torch has no such attribute.
    """
    natives = [(group, native) for group in groups if (native := _native_group_of(group)) is not None]
    single = subgroup([dist.get_rank()], None) if natives else None
    for group, native in natives:
        _taken_over[group] = native
        group.mesh_info.replicate_process_group = single
        if getattr(group, "_all_reduce_process_group", None) is not single:
            raise ValueError(
                f"torch {torch.__version__} does not let others average between replicas of a mesh of two dimensions; "
                "shard with fully_shard(model, mesh=mesh['shard']) and pass across=mesh['replicate']"
            )


def give_back_averaging(groups: Iterable[Any]) -> None:
    """Have FSDP average replicas, and raise errors, by itself again."""
    for group in groups:
        if (native := _taken_over.pop(group, None)) is not None:
            group.mesh_info.replicate_process_group = native
        for name in _COLLECTIVE_METHODS:
            vars(group).pop(name, None)


def explain_errors(groups: Iterable[Any], explain: Callable[[RuntimeError], RuntimeError]) -> None:
    """Have errors of FSDP's own collectives, which name no rank, replaced by those that ``explain`` returns."""
    for group in groups:
        for name in _COLLECTIVE_METHODS:
            if (method := getattr(group, name, None)) is not None:
                setattr(group, name, _explained(method, explain))


def _explained(method: Callable[..., Any], explain: Callable[[RuntimeError], RuntimeError]) -> Callable[..., Any]:
    @wraps(method)
    def call(*args: Any, **options: Any) -> Any:
        try:
            return method(*args, **options)
        except PeerLostError:
            raise
        except RuntimeError as error:
            if (explained := explain(error)) is error:
                raise
            raise explained from error

    return call
