"""Abreast: all workers of a process go through their one model as one batch, and their gradients are kept apart.

After a step, workers hold the same parameters. Whatever a model does to examples one by one, it may then do to all
workers' examples at once; only two things belong to a worker: the statistics of a batch norm, and the gradients of
parameters. Inside `Abreast`, every layer that is known here minds that, and writes each worker's gradients where they
are wanted. A GPU that would work through eight small batches has one large one instead. On the way, a norm
and the ReLU after it become one, and images are halved by a faster kernel.
"""

import importlib.util
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from gradwire_lab.train.unrolled import Unrolled

_CONVOLUTION = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_LINEAR = ("input", "weight", "bias")
_NORM = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
_POOL = ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
_RELU = (F.relu, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_)
_EMBEDDING = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
_LSTM = ("input", "state", "weights", "biases", "layers", "dropout", "train", "both_ways", "batch_first")


class Abreast(TorchFunctionMode):
    """Within it, a model takes the examples of so many workers, those of the first worker first.

    Attributes:
        grads: Where each parameter's gradients go, [workers, ...], by the parameter's identity.
        kept: The workers' statistics, [workers, channels], by the identity of the tensor that the model holds.
        rectified: Norms, by the identities of their weights, whose outcome goes through a ReLU and nowhere else.
        served: Parameters whose gradients have been taken care of.
        strange: What was met that only a pass of each worker by itself does right.
    """

    def __init__(
        self, workers: int, grads: Mapping[int, Tensor], kept: Mapping[int, Tensor], rectified: Set[int] = frozenset()
    ) -> None:
        super().__init__()
        self.workers, self.grads, self.kept, self.rectified = workers, grads, kept, rectified
        self.served: set[int] = set()
        self.strange: set[str] = set()
        self._normal: dict[int, tuple[Tensor, int, list[str]]] = {}  # a norm's outcome, whose, and its uses

    @property
    def rectifiable(self) -> frozenset[int]:
        """Norms that could have been rectified, now that a pass is over."""
        return frozenset(norm for _, norm, uses in self._normal.values() if uses == ["relu"] or uses[:1] == ["relu_"])

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        for x in args:
            if (known := self._normal.get(id(x))) is not None:
                known[2].append(_use(func, named))
                if func in _RELU and known[1] in self.rectified:
                    return x
        if func is torch.conv2d:
            return self._convolution(_named(_CONVOLUTION, args, named))
        if func is F.linear:
            return self._linear(_named(_LINEAR, args, named))
        if func is F.batch_norm:
            return self._norm(_named(_NORM, args, named))
        if func is F.max_pool2d or func is torch.max_pool2d:
            return _pooled(_named(_POOL, args, named))
        if func is F.embedding:
            return self._embedding(_named(_EMBEDDING, args, named))
        if func == torch._VF.lstm:
            return self._lstm(func, _named(_LSTM, args, named))
        return func(*args, **named)

    def _places(self, *parameters: Tensor | None) -> list[Tensor | None]:
        places = []
        for parameter in parameters:
            places.append(None if parameter is None else self.grads.get(id(parameter)))
            if id(parameter) in self.served:
                self.strange.add("a parameter that is used more than once")  # its gradients would have to be added up
            if parameter is not None:
                self.served.add(id(parameter))
        return places

    def _convolution(self, given: dict[str, Any]) -> Tensor:
        x, weight, bias = given["input"], given["weight"], given.get("bias")
        rest = [_pair(given.get(name, default)) for name, default in (("stride", 1), ("padding", 0), ("dilation", 1))]
        if isinstance(given.get("padding"), str):
            self.strange.add("a convolution whose padding has a name")
            return F.conv2d(**given)
        places = self._places(weight, bias)
        made: Tensor = _Convolution.apply(x, weight, bias, self.workers, places, rest, given.get("groups", 1))  # type: ignore[no-untyped-call]
        return made

    def _linear(self, given: dict[str, Any]) -> Tensor:
        x, weight, bias = given["input"], given["weight"], given.get("bias")
        made: Tensor = _Linear.apply(x, weight, bias, self.workers, self._places(weight, bias))  # type: ignore[no-untyped-call]
        return made

    def _embedding(self, given: dict[str, Any]) -> Tensor:
        if given.get("max_norm") is not None or given.get("scale_grad_by_freq") or given.get("sparse"):
            self.strange.add("an embedding that is not a plain one")
        about = self._places(given["weight"])[0], given.get("padding_idx")
        made: Tensor = _Embedding.apply(given["weight"], given["input"], self.workers, *about)  # type: ignore[no-untyped-call]
        return made

    def _lstm(self, func: Callable[..., Any], given: dict[str, Any]) -> Any:
        plain = given["biases"] and given["batch_first"] and not given["both_ways"] and len(given["weights"]) == 4
        if not plain or given["layers"] != 1 or given["input"].dim() != 3:
            self.strange.add("an LSTM of other than one plain layer, batch first")
            return func(*given.values())
        x, h, c, *weights = (_cast(each, keep=True) for each in (given["input"], *given["state"], *given["weights"]))
        about = self.workers, self._places(*given["weights"])
        y, h, c = Unrolled.apply(x, h[0], c[0], *weights, *about)  # type: ignore[no-untyped-call]
        return y, h[None], c[None]

    def _norm(self, given: dict[str, Any]) -> Tensor:
        kept = [self.kept.get(id(given[name])) for name in ("running_mean", "running_var")]
        weight, bias = given.get("weight"), given.get("bias")
        if None in kept or weight is None or bias is None or not given.get("training"):
            self.strange.add("a batch norm without weights or statistics")
            return F.batch_norm(**given)
        about = kept, given.get("momentum", 0.1), given.get("eps", 1e-5), id(weight) in self.rectified
        made: Tensor = _Norm.apply(given["input"], weight, bias, self.workers, self._places(weight, bias), *about)  # type: ignore[no-untyped-call]
        self._normal[id(made)] = made, id(weight), []
        return made


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, workers: int, places: Any, rest: Any, groups: int
    ) -> Tensor:
        x, weight = _cast(x), _cast(weight)
        if x.is_contiguous(memory_format=torch.channels_last):
            weight = weight.contiguous(memory_format=torch.channels_last)
        ctx.save_for_backward(x, weight)
        ctx.workers, ctx.places, ctx.about = workers, places, (*rest, False, [0, 0], groups)
        stride, padding, dilation = rest
        return torch.conv2d(x, weight, None if bias is None else bias.to(x.dtype), stride, padding, dilation, groups)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        into, of_bias = ctx.places
        derive = torch.ops.aten.convolution_backward
        dx = None
        if ctx.needs_input_grad[0]:
            dx = derive(dy, x, weight, None, *ctx.about, [True, False, False])[0]
        shares = zip(dy.chunk(ctx.workers), x.chunk(ctx.workers), strict=True)
        for place, (one, own) in zip([] if into is None else into, shares, strict=into is not None):
            place.copy_(derive(one, own, weight, None, *ctx.about, [False, True, False])[1])
        if of_bias is not None:
            of_bias.copy_(dy.unflatten(0, (ctx.workers, -1)).sum((1, 3, 4)))
        return dx, *(None,) * 6


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, workers: int, places: Any) -> Tensor:
        x, weight = _cast(x), _cast(weight)
        ctx.save_for_backward(x, weight)
        ctx.workers, ctx.places = workers, places
        return F.linear(x, weight, None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        into, of_bias = ctx.places
        rows, told = (each.reshape(ctx.workers, -1, each.shape[-1]) for each in (x, dy))
        if into is not None:
            into.copy_(told.transpose(1, 2) @ rows)
        if of_bias is not None:
            of_bias.copy_(told.sum(1))
        return (dy @ weight if ctx.needs_input_grad[0] else None), *(None,) * 4


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, tokens: Tensor, workers: int, place: Tensor | None, padding: Any) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.workers, ctx.place, ctx.padding, ctx.rows = workers, place, padding, len(weight)
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        (tokens,) = ctx.saved_tensors
        if ctx.place is not None:  # to each worker rows of its own
            own = ctx.rows * torch.arange(ctx.workers, device=tokens.device)[:, None]
            moved = (tokens.reshape(ctx.workers, -1) + own).view(tokens.shape)
            made = torch.ops.aten.embedding_dense_backward(dy, moved, ctx.workers * ctx.rows, -1, False)
            ctx.place.copy_(made.view_as(ctx.place))
            if ctx.padding is not None:
                ctx.place[:, ctx.padding] = 0.0
        return None, None, None, None, None


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, workers: int, places: Any, kept: Any, momentum: float,
        eps: float, relu: bool,
    ) -> Tensor:  # fmt: skip
        ctx.workers, ctx.places, ctx.eps, ctx.relu, ctx.fast = workers, places, eps, relu, _fast(x)
        if ctx.fast:
            from gradwire.kernels.cuda import norm

            x = x.contiguous(memory_format=torch.channels_last)
            y, *found = norm.forward(x, kept, weight, bias, momentum, eps, workers, relu)
            ctx.save_for_backward(x, *found, weight, bias)
            return y
        wide, gains = _beside(x, workers), (weight.repeat(workers), bias.repeat(workers))
        held = [each.view(-1) for each in kept]
        y, *found = torch.ops.aten.native_batch_norm(wide, *gains, *held, True, momentum, eps)
        y = y.relu_() if relu else y
        ctx.save_for_backward(wide, *found, gains[0], y)
        return _behind(y, workers) if workers > 1 else y.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, middle, scale, weight, last = ctx.saved_tensors
        if ctx.fast:
            from gradwire.kernels.cuda import norm

            dx, *found = norm.backward(dy, x, middle, scale, weight, last, ctx.workers, ctx.relu)
        else:
            told = _beside(dy, ctx.workers)
            told = told * (last > 0) if ctx.relu else told
            dx, *found = torch.ops.aten.native_batch_norm_backward(
                told, x, weight, None, None, middle, scale, True, ctx.eps, [True, True, True]
            )
            dx = _behind(dx, ctx.workers)
        for place, grad in zip(ctx.places, found, strict=True):
            if place is not None:
                place.copy_(grad.view_as(place))
        return dx, *(None,) * 8


def _named(names: tuple[str, ...], args: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
    return {**dict(zip(names, args, strict=False)), **named}


def _use(func: Callable[..., Any], named: Mapping[str, Any]) -> str:
    """What a tensor was used for; in place, whoever uses it later will find it changed."""
    if func not in _RELU:
        return "else"
    return "relu_" if named.get("inplace") or func in (torch.relu_, Tensor.relu_) else "relu"


def _pair(number: Any) -> Any:
    return [number, number] if isinstance(number, int) else list(number)


def _cast(x: Tensor, keep: bool = False) -> Tensor:
    """As autocast would, which looks at operations of torch alone; ``keep`` the way back to where it came from."""
    kind = x.device.type
    x = x if keep else x.detach()
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def _beside(x: Tensor, workers: int) -> Tensor:
    """All workers' channels in one dimension. [workers * batch, c, ...] -> [batch, workers * c, ...]."""
    apart: Tensor = x.unflatten(0, (workers, -1))
    return apart.movedim(0, 1).flatten(1, 2).contiguous()


def _behind(x: Tensor, workers: int) -> Tensor:
    apart: Tensor = x.unflatten(1, (workers, -1))
    return apart.movedim(1, 0).flatten(0, 1).contiguous()


def _pooled(given: dict[str, Any]) -> Tensor:
    x = given["input"]
    halves = _pair(given["kernel_size"]) == _pair(given.get("stride") or given["kernel_size"]) == [2, 2]
    plain = _pair(given.get("padding", 0)) == [0, 0] and _pair(given.get("dilation", 1)) == [1, 1]
    if not (halves and plain and _fast(x) and x.shape[2] % 2 == x.shape[3] % 2 == 0):
        made: Tensor = F.max_pool2d(**given)
        return made
    from gradwire.kernels.cuda.pool import pool

    return pool(x)


def _fast(x: Tensor) -> bool:
    return x.dim() == 4 and x.is_cuda and importlib.util.find_spec("triton") is not None
