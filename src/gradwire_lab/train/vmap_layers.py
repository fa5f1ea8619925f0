"""Wide layers: convolutions and batch norms of k stacked models, as those of one model of k times the channels.

`torch.func.vmap` maps a model over its replicas, but knows nothing of layouts, autocast or fast kernels in doing so.
Inside `WideLayers`, the two operations that take nearly all the time of an image model bring rules of their own. The
channels of all replicas lie next to each other, [batch, height, width, replica, channel]: a convolution is a grouped
one, and a norm, which sees each channel by itself, is just a wider one.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_NORM_ARGUMENTS = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")


class _Convolution(torch.autograd.Function):
    """A convolution that vmap turns into a grouped one."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, rest: tuple[Any, ...]) -> Tensor:
        return F.conv2d(x, weight, None, *rest)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...  # gradients are those of what `vmap` calls

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, weight: Tensor, rest: tuple[Any, ...]) -> tuple[Tensor, int]:
        k = info.batch_size
        wide = _merge(x, dims[0], k, 1)
        weights = _merge(weight, dims[1], k, 0)
        stride, padding, dilation, groups = rest
        return _separate(F.conv2d(wide, weights, None, stride, padding, dilation, groups * k), k), 1


class _Norm(torch.autograd.Function):
    """A batch norm in training that vmap widens."""

    @staticmethod
    def forward(*args: Any) -> Any:
        return F.batch_norm(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def vmap(
        info: Any, dims: Any, x: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor, *rest: Any
    ) -> tuple[Tensor, int]:
        k = info.batch_size
        wide = _merge(x, dims[0], k, 1)
        running = [each.movedim(dim, 0).view(-1) for each, dim in ((mean, dims[1]), (var, dims[2]))]  # change in place
        gains = [_merge(each, dim, k, 0) for each, dim in ((weight, dims[3]), (bias, dims[4]))]
        _, momentum, eps = rest
        return _separate(F.batch_norm(wide, running[0], running[1], gains[0], gains[1], True, momentum, eps), k), 1


class WideLayers(TorchFunctionMode):
    """Within it, and within vmap, image models run as wide ones."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        if func is torch.conv2d and not named and len(args) == 7 and args[2] is None:
            return _Convolution.apply(args[0], args[1], args[3:])  # type: ignore[no-untyped-call]
        if func is F.batch_norm:
            whole = {**dict(zip(_NORM_ARGUMENTS, args, strict=False)), **named}
            if whole.get("training") and None not in (whole.get(name) for name in _NORM_ARGUMENTS):
                return _Norm.apply(*(whole[name] for name in _NORM_ARGUMENTS))  # type: ignore[no-untyped-call]
        if func == torch._VF.lstm and (rest := args[3:]) and rest[:2] == (True, 1) and rest[4:] == (False, True):
            return _lstm(args[0], args[1], args[2])
        if func is Tensor.data_ptr and torch._C._functorch.is_batchedtensor(args[0]):
            return 0  # the replicas' weights have no address of their own, so that nn.LSTM leaves them where they are
        return func(*args, **named)


def _lstm(x: Tensor, state: Sequence[Tensor], weights: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """One layer, batch first, step by step: vmap knows each operation, but not the whole layer."""
    w, u, of_w, of_u = weights
    inputs = F.linear(x, w, of_w + of_u)
    h, c = (part[0].to(inputs.dtype) for part in state)
    hiddens = []
    for step in inputs.unbind(1):
        i, f, g, o = (step + F.linear(h, u)).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        hiddens.append(h)
    return torch.stack(hiddens, 1), h[None], c[None]


def interleave_channels(x: Tensor) -> Tensor:
    """Images of all replicas [k, batch, c, h, w], laid out in memory as `WideLayers` likes them best."""
    return x.permute(1, 3, 4, 0, 2).contiguous().permute(3, 0, 4, 1, 2)


def _merge(x: Tensor, dim: int | None, k: int, channel: int) -> Tensor:
    """All replicas' channels in one dimension."""
    shared = (*x.shape[:channel], k, *x.shape[channel:])
    stacked = x.unsqueeze(channel).expand(shared) if dim is None else x.movedim(dim, channel)
    return stacked.flatten(channel, channel + 1)


def _separate(y: Tensor, k: int) -> Tensor:
    return y.view(y.shape[0], k, -1, *y.shape[2:])
