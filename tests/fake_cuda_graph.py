"""Work of a CPU recorded and replayed, call by call of torch, as a CUDA graph does it for a GPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from gradwire.engine import encoders
from gradwire.integrations import wire as wires
from gradwire.integrations.setup import Setup
from gradwire.kernels import dispatch, fused

T = TypeVar("T")


class Pool:
    """Memory that several graphs share: what nobody holds any more, later ones use, as torch has it on a GPU."""

    def __init__(self) -> None:
        self._blocks: dict[int, tuple[bytearray, StorageWeakRef]] = {}  # by address; and who holds it

    def place(self, x: Tensor) -> Tensor:
        """A copy of a new tensor, in the smallest block that is free and large enough."""
        n = x.numel() * x.element_size()
        if n == 0:
            return x
        free = [block for block, held in self._blocks.values() if held.expired() and len(block) >= n]
        block = min(free, key=len, default=None) or bytearray(n)
        placed = _lay(block, x.dtype).as_strided(x.shape, x.contiguous().stride()).copy_(x)
        storage = placed.untyped_storage()
        self._blocks[storage.data_ptr()] = block, StorageWeakRef(storage)
        return placed

    def unheld(self, x: Any) -> Any:
        """The same tensor as a graph knows it: a graph holds no memory."""
        found = self._blocks.get(x.untyped_storage().data_ptr()) if isinstance(x, Tensor) else None
        return x if found is None else _lay(found[0], x.dtype).as_strided(x.shape, x.stride(), x.storage_offset())


def _lay(block: bytearray, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(block, dtype=dtype, count=len(block) // dtype.itemsize)


class _CallRecorder(TorchDispatchMode):
    """Notes every call with its arguments, and those of its outcomes that are tensors of their own."""

    def __init__(self, pool: Pool) -> None:
        super().__init__()
        self._pool = pool
        self.calls: list[tuple[Any, Any, Any, list[Tensor | None]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {x.untyped_storage().data_ptr() for x in _leaves((args, kwargs)) if isinstance(x, Tensor)}

        def is_new(x: Any) -> bool:  # a view of an argument, or the argument itself, is up to date already
            return isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in known

        out = _mapped(lambda x: self._pool.place(x) if is_new(x) else x, func(*args, **(kwargs or {})))
        fresh = [self._pool.unheld(x) if is_new(x) and x.numel() else None for x in _leaves(out)]
        self.calls.append((func, *_mapped(self._pool.unheld, (args, kwargs or {})), fresh))
        return out


class FakeCudaGraph:
    """What is recorded is done at once, so the first replay does nothing. Later ones fill the same tensors."""

    made = 0

    def __init__(self, pool: Pool | None = None) -> None:
        self._recorder = _CallRecorder(pool or Pool())
        self._done = False

    @contextmanager
    def capturing(self) -> Iterator[None]:
        with self._recorder:
            yield
        self._done = True
        FakeCudaGraph.made += 1

    def replay(self) -> None:
        if self._done:
            self._done = False
            return
        for func, args, kwargs, fresh in self._recorder.calls:
            for old, new in zip(fresh, _leaves(func(*args, **kwargs)), strict=True):
                if old is not None:
                    old.copy_(new)


class FakeCudaGraphs:
    """Makes graphs that share their memory."""

    def __init__(self) -> None:
        self._pool = Pool()

    def __call__(self) -> FakeCudaGraph:
        return FakeCudaGraph(self._pool)


# Arguments of torch's operators are lists and dictionaries of few leaves: torch's own pytree takes ten times as long.


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, list | tuple | dict):
        for branch in tree.values() if isinstance(tree, dict) else tree:
            yield from _leaves(branch)
    else:
        yield tree


def _mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _mapped(function, branch) for key, branch in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)([_mapped(function, branch) for branch in tree])
    return function(tree)


def largest(size: Tensor, k: int) -> Tensor:
    """`select.top` without a look at the data, for numbers that all differ."""
    return size.topk(k).indices.sort().values


def zero_nonfinite(flat: Tensor) -> tuple[Tensor, Tensor]:
    """As on a GPU, where the status is not read."""
    return fused.finite_or_zero(flat)


def eager_and_captured(train: Callable[..., T], *args: Any) -> tuple[T, T]:
    """What a training leaves whose steps run eagerly, and one whose steps are captured, in a process of a test."""
    Setup.stays_on_device = property(lambda setup: True)
    dispatch.faster = lambda device: {}
    fused.top, encoders.zero_nonfinite = largest, zero_nonfinite
    wires.graphs_on = lambda device: None
    eager = train(*args)
    wires.graphs_on = lambda device: FakeCudaGraphs()
    return eager, train(*args)
