"""TorchBackend: a torch.distributed process group (gloo, NCCL, or gloo with CUDA tensors)."""

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from gradwire.comm.agreement_barrier import AgreementBarrier, CollectiveProgress
from gradwire.comm.backend import Backend, CountingBackend, SingleBackend
from gradwire.comm.collectives import AllGatherOp, AllReduceOp, AllToAllOp, Collective
from gradwire.comm.emulated import maybe_emulated
from gradwire.comm.liveness import ProbeAddress, ProbeAddresses, probe_address

_made: WeakKeyDictionary[Any, Counter[tuple[Any, ...]]] = WeakKeyDictionary()  # groups by ranks, of each world

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}

# Into one tensor: into a list, torch gathers to a tensor of its own first, and copies. Older versions of torch know
# only the second name; newer ones warn of it.
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def private_group(group: dist.ProcessGroup | None, timeout: timedelta | None = None) -> dist.ProcessGroup:
    """A group of our own over the same ranks, so that our collectives never mix with the user's.

    Its timeout is that of the given one, unless another is given.
    """
    parent = group if group is not None else dist.group.WORLD
    if not isinstance(parent, dist.ProcessGroup):  # what torch hands to ranks outside
        raise ValueError(f"rank {dist.get_rank()} is not in the process_group; attach only on the ranks that are")
    members_only = parent is not dist.group.WORLD  # ranks outside a smaller group do not take part in making it
    return subgroup(dist.get_process_group_ranks(parent), parent, timeout, members_only)


def subgroup(
    ranks: Sequence[int], parent: dist.ProcessGroup | None, timeout: timedelta | None = None, members_only: bool = True
) -> dist.ProcessGroup:
    """A group of some ranks of the world, with their parent's timeout. All ranks must call it, or ``members_only``."""
    timeout = timeout or timeout_of(parent if parent is not None else dist.group.WORLD)
    with _named(ranks, members_only):
        made = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=members_only)
    assert isinstance(made, dist.ProcessGroup)
    return made


@contextmanager
def _named(ranks: Sequence[int], members_only: bool) -> Iterator[None]:
    """Name the next group by how many of the same ranks we have made, which is the same on all of them.

    Torch's own names have the number of groups that a rank has joined. Ranks would wait for groups of different names
    where some have joined one without the others.
    """
    made, key = _made.setdefault(dist.group.WORLD, Counter()), (*ranks, members_only)
    made[key] += 1
    name = hashlib.sha1(f"{key} {made[key]}".encode(), usedforsecurity=False).hexdigest()
    module: Any = distributed_c10d
    named_by_torch = getattr(module, "_process_group_name", None)  # private to torch
    module._process_group_name = lambda *_, **__: f"gradwire_{name}"
    try:
        yield
    finally:
        module._process_group_name = named_by_torch


def timeout_of(group: dist.ProcessGroup | None) -> timedelta | None:
    """The timeout of a group's collectives. A new group would have half an hour, whatever its parent has."""
    try:
        assert group is not None
        timeout = group._get_backend(group._device_types[0]).options._timeout
    except (AssertionError, AttributeError, IndexError, RuntimeError):  # a backend that does not show it
        return None
    return timeout if isinstance(timeout, timedelta) else None


class TorchBackend(CountingBackend):
    """Collectives of one process group."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)
        self.stream_ordered = dist.get_backend(group) == "nccl"
        if self.stream_ordered:  # it takes CUDA tensors only
            self.device = torch.device("cuda", torch.cuda.current_device())
        # Of CUDA tensors gloo takes only some collectives; through the host it takes all of them.
        self._via_host = dist.get_backend(group) == "gloo"
        self.probe_addresses: ProbeAddresses = {}
        self.progress = CollectiveProgress(group)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group; None is that of all ranks."""
        return self.progress.group

    def exchange_probe_addresses(self) -> None:
        """Let all members know where each listens for probes. All members must call it."""
        rows = self.gather_json([dist.get_rank(), *probe_address()])
        self.probe_addresses = {rank: ProbeAddress(*where) for rank, *where in rows}

    def move(self, collective: Collective, out: Tensor | None = None) -> Tensor:
        x = collective.tensor.detach().contiguous()
        out = x.new_empty(self._shape(collective)) if out is None else out
        try:
            with self.progress:
                if self._via_host and x.is_cuda:
                    on_host = torch.empty_like(out, device="cpu")
                    self._move_into(on_host, collective, x.cpu())
                    out.copy_(on_host)
                else:
                    self._move_into(out, collective, x)
        except RuntimeError as error:
            if self.barrier is None:
                raise
            raise self.barrier.explain(error) from error
        return out

    def _shape(self, collective: Collective) -> Sequence[int]:
        """Of the result."""
        if isinstance(collective, AllToAllOp):
            return (sum(collective.into),)
        x = collective.tensor
        return (self.world, x.numel()) if isinstance(collective, AllGatherOp) else x.shape

    def _move_into(self, out: Tensor, collective: Collective, x: Tensor) -> None:
        if isinstance(collective, AllReduceOp):
            dist.all_reduce(out.copy_(x), _OPS[collective.op], group=self.group)
        elif isinstance(collective, AllGatherOp):
            _gather_into(out.view(-1), x, group=self.group)
        elif isinstance(collective, AllToAllOp):
            splits = list(collective.into), list(collective.out)
            if self._via_host:
                self._pairwise_all_to_all(x.split(splits[1]), out.split(splits[0]))
            else:
                dist.all_to_all_single(out, x, *splits, group=self.group)
        else:
            root = 0 if self.group is None else dist.get_global_rank(self.group, 0)
            dist.broadcast(out.copy_(x), root, group=self.group)

    def _pairwise_all_to_all(self, mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
        """Send to the next rank, then to the one after it and so on.

        Gloo's own sends to all at once, and to each peer in one direction at a time: on a thin link that takes 1.4
        times as long among 4 ranks, and twice as long between 2.
        """
        theirs[self.rank].copy_(mine[self.rank])
        turns = [(self.rank + turn) % self.world for turn in range(1, self.world)]
        ranks = dist.get_process_group_ranks(self.group or dist.group.WORLD)
        receives = [
            dist.irecv(theirs[peer], ranks[peer], group=self.group) for peer in turns[::-1] if theirs[peer].numel()
        ]
        for peer in turns:
            if mine[peer].numel():
                _wait(dist.isend(mine[peer], ranks[peer], group=self.group))
        for receive in receives:
            _wait(receive)


def _wait(work: dist.Work | None) -> None:
    assert work is not None, "a rank sends nothing to itself"
    work.wait()


def connect(group: dist.ProcessGroup | None = None, timeout: timedelta | None = None) -> Backend:
    """A backend of our own over the ranks of the user's group; a world of one where no process group exists."""
    if not (dist.is_available() and dist.is_initialized()):
        ranks = os.environ.get("WORLD_SIZE", "1")
        if ranks != "1":
            raise ValueError(
                f"WORLD_SIZE is {ranks}, but there is no process group, so this rank would train alone; "
                "call torch.distributed.init_process_group before gradwire, or unset WORLD_SIZE"
            )
        return SingleBackend()
    return backend_of(private_group(group, timeout))


def backend_of(private: dist.ProcessGroup) -> Backend:
    """A backend over a group of our own, whose ranks can probe each other and agree. All of them must call it."""
    backend = TorchBackend(private)
    backend.exchange_probe_addresses()
    backend.barrier = AgreementBarrier(backend.progress, backend.probe_addresses, timeout_of(private))
    return maybe_emulated(backend)
