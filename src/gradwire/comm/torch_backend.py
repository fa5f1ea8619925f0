"""TorchBackend: a torch.distributed process group (gloo, NCCL, or gloo with CUDA tensors)."""

import json
import os
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.comm.backend import Backend, CountingBackend
from gradwire.comm.collectives import AllGatherOp, AllReduceOp, AllToAllOp, Collective
from gradwire.comm.emulated import pretended
from gradwire.comm.liveness import Book, ProbeAddress, door, lost
from gradwire.comm.single import SingleBackend
from gradwire.core.payload import Payload
from gradwire.core.requests import Gather

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}

# Into one tensor: into a list, torch gathers to a tensor of its own first, and copies. Older versions of torch know
# only the second name; newer ones warn of it.
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def private_group(group: dist.ProcessGroup | None, waits: timedelta | None = None) -> dist.ProcessGroup:
    """A group of our own over the same ranks, so that our collectives never mix with the user's.

    It waits for its members as long as the given one does, or as it is told.
    """
    parent = group if group is not None else dist.group.WORLD
    if not isinstance(parent, dist.ProcessGroup):  # what torch hands to those outside
        raise ValueError(f"rank {dist.get_rank()} is not in the process_group; attach only on the ranks that are")
    # Ranks outside a smaller group are not here to help. Of the whole world all are, and then nobody needs the name
    # that torch makes of how many groups a rank has joined, which may differ between ranks.
    local = parent is not dist.group.WORLD
    ranks = dist.get_process_group_ranks(parent)
    made = dist.new_group(ranks, timeout=waits or patience(parent), use_local_synchronization=local)
    assert isinstance(made, dist.ProcessGroup)
    return made


def subgroup(ranks: Sequence[int], parent: dist.ProcessGroup | None = None) -> dist.ProcessGroup:
    """A group of some ranks of the world, as patient as their parent; only they must call it."""
    waits = patience(parent if parent is not None else dist.group.WORLD)
    made = dist.new_group(list(ranks), timeout=waits, use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    return made


def patience(group: dist.ProcessGroup | None) -> timedelta | None:
    """How long a group waits for its members. A new one would wait half an hour, whatever its parent was told."""
    try:
        assert group is not None
        found = group._get_backend(group._device_types[0]).options._timeout
    except (AssertionError, AttributeError, IndexError, RuntimeError):  # a backend that keeps it to itself
        return None
    return found if isinstance(found, timedelta) else None


class TorchBackend(CountingBackend):
    """Collectives of one process group."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.group = group
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)
        self.stream_ordered = dist.get_backend(group) == "nccl"
        if self.stream_ordered:  # it takes CUDA tensors only
            self.device = torch.device("cuda", torch.cuda.current_device())
        # Of CUDA tensors gloo takes only some collectives; through the host it takes all of them.
        self._via_host = dist.get_backend(group) == "gloo"
        self.book: Book = {}  # where members can be knocked at, if they do not answer

    def introduce(self) -> None:
        """Tell each other where to knock. All members must call it."""
        note = torch.tensor(list(json.dumps([dist.get_rank(), *door()]).encode()), dtype=torch.uint8)
        (heard,) = self.answer([Gather(Payload(note.to(self.device)))])
        rows = [json.loads(bytes(payload.data.tolist()).rstrip(b"\0")) for payload in heard]
        self.book = {rank: ProbeAddress(*where) for rank, *where in rows}

    def move(self, collective: Collective) -> Tensor:
        x = collective.tensor
        try:
            if self._via_host and x.is_cuda:
                return self._move(collective, x.cpu()).to(x.device)
            return self._move(collective, x.detach().contiguous())
        except RuntimeError as wrong:
            raise lost(wrong, dist.get_rank(), self.book) from wrong

    def move_into(self, collective: Collective, out: Tensor) -> None:
        if self._via_host:
            out.copy_(self.move(collective))
            return
        try:
            self._fill_(out, collective, collective.tensor.contiguous())
        except RuntimeError as wrong:
            raise lost(wrong, dist.get_rank(), self.book) from wrong

    def _move(self, collective: Collective, x: Tensor) -> Tensor:
        if isinstance(collective, AllGatherOp):
            out = x.new_empty(self.world, x.numel())
        elif isinstance(collective, AllToAllOp):
            out = x.new_empty(sum(collective.into))
        else:
            out = torch.empty_like(x)
        self._fill_(out, collective, x)
        return out

    def _fill_(self, out: Tensor, collective: Collective, x: Tensor) -> None:
        """Write a collective's result to where it belongs."""
        if isinstance(collective, AllReduceOp):
            dist.all_reduce(out.copy_(x), _OPS[collective.op], group=self.group)
        elif isinstance(collective, AllGatherOp):
            _gather_into(out.view(-1), x, group=self.group)
        elif isinstance(collective, AllToAllOp):
            splits = list(collective.into), list(collective.out)
            if self._via_host:
                self._hand_round(x.split(splits[1]), out.split(splits[0]))
            else:
                dist.all_to_all_single(out, x, *splits, group=self.group)
        else:
            root = 0 if self.group is None else dist.get_global_rank(self.group, 0)
            dist.broadcast(out.copy_(x), root, group=self.group)

    def _hand_round(self, mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
        """All-to-all in turns, to the next rank, the one after it and so on.

        Gloo's own sends to all at once, and to each peer in one direction at a time: on a thin link that takes 1.4
        times as long among 4 ranks, and twice as long between 2.
        """
        theirs[self.rank].copy_(mine[self.rank])
        turns = [(self.rank + turn) % self.world for turn in range(1, self.world)]
        ranks = dist.get_process_group_ranks(self.group or dist.group.WORLD)
        receipts = [
            dist.irecv(theirs[peer], ranks[peer], group=self.group) for peer in turns[::-1] if theirs[peer].numel()
        ]
        for peer in turns:
            if mine[peer].numel():
                _wait(dist.isend(mine[peer], ranks[peer], group=self.group))
        for receipt in receipts:
            _wait(receipt)


def _wait(work: dist.Work | None) -> None:
    assert work is not None, "a rank hands nothing to itself"
    work.wait()


def connect(group: dist.ProcessGroup | None = None, patience: timedelta | None = None) -> Backend:
    """A link of our own beside the user's group; a world of one where no process group exists."""
    if not (dist.is_available() and dist.is_initialized()):
        ranks = os.environ.get("WORLD_SIZE", "1")
        if ranks != "1":
            raise ValueError(
                f"WORLD_SIZE is {ranks}, but there is no process group, so this rank would train alone; "
                "call torch.distributed.init_process_group before gradwire, or unset WORLD_SIZE"
            )
        return SingleBackend()
    link = TorchBackend(private_group(group, patience))
    link.introduce()
    return pretended(link)
