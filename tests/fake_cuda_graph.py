"""Work of a CPU written down and done again, call by call of torch, as a CUDA graph does it for a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


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


class _Pen(TorchDispatchMode):
    """Notes every call with its arguments and its outcome."""

    def __init__(self, pool: Pool) -> None:
        super().__init__()
        self._pool = pool
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = _addresses((args, kwargs))
        out = tree_map(lambda x: self._pool.place(x) if _is_new(x, known) else x, func(*args, **(kwargs or {})))
        self.calls.append(tree_map(self._pool.unheld, (func, args, kwargs or {}, out)))
        return out


class WrittenGraph:
    """What is written down is done at once, so the first run is none. Later ones fill the very tensors of the first."""

    made = 0

    def __init__(self, pool: Pool | None = None) -> None:
        self._pen = _Pen(pool or Pool())
        self._done = False

    @contextmanager
    def capturing(self) -> Iterator[None]:
        with self._pen:
            yield
        self._done = True
        WrittenGraph.made += 1

    def replay(self) -> None:
        if self._done:
            self._done = False
            return
        for func, args, kwargs, out in self._pen.calls:
            known = _addresses((args, kwargs))
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if _is_new(old, known) and old.numel():
                    old.copy_(new)


class WrittenGraphs:
    """Makes graphs that share their memory."""

    def __init__(self) -> None:
        self._pool = Pool()

    def __call__(self) -> WrittenGraph:
        return WrittenGraph(self._pool)


def _addresses(arguments: Any) -> set[int]:
    return {x.untyped_storage().data_ptr() for x in tree_leaves(arguments) if isinstance(x, Tensor)}


def _is_new(x: Any, known: set[int]) -> bool:
    """Whether it is a tensor of its own: a view of an argument, or the argument itself, is up to date already."""
    return isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in known


def largest(size: Tensor, k: int) -> Tensor:
    """`fused._largest` without a look at the data, for numbers that all differ."""
    return size.topk(k).indices.sort().values
