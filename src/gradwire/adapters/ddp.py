"""DDP's door: a communication hook that takes gradients as backward delivers them.

DDP's buckets only deliver: what is compressed with what is the plan's business, so it does not matter that DDP
rebuilds its buckets after the first step, and the hook computes what the plain loop computes. A launch leaves as soon
as its last gradient has arrived, and travels while backward goes on. All futures complete together, at the end, because
only then is it known that no rank saw a bad gradient; DDP waits for all of them there anyway.
"""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with the types themselves.

from collections.abc import Callable
from concurrent.futures import Future as ThreadFuture
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from gradwire.adapters.wire import Wire
from gradwire.sync.drive import drive
from gradwire.sync.session import Grads, Heard, Verdict


def find_ddp(model: nn.Module) -> DistributedDataParallel | None:
    """The model itself, or the DDP module that torch.compile wrapped."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, DistributedDataParallel) else None


class Courier:
    """One backward pass after the other: collects gradients, launches, and completes DDP's futures.

    Attributes:
        plain: In what format to add gradients up as DDP would do without us, if so.
    """

    def __init__(self, wire: Wire, ddp: DistributedDataParallel) -> None:
        self.wire = wire
        self.plain: torch.dtype | None = None
        self._group = ddp.process_group
        self._names = {id(p): name for name, p in wire.parameters.items()}
        self._may_lack = bool(ddp.find_unused_parameters or ddp.static_graph)
        self._touched: set[str] = set()
        self._begin()
        if self._may_lack:
            for name, p in wire.parameters.items():
                p.register_post_accumulate_grad_hook(lambda _, name=name: self._touched.add(name))

    def _begin(self) -> None:
        self._views: dict[str, Tensor] = {}
        self._futures: list[tuple[torch.futures.Future[Tensor], Tensor]] = []
        self._launched: list[ThreadFuture[Heard]] = []
        self._touched.clear()

    def receive(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Take one bucket; its future completes when the whole step is agreed on."""
        if self.plain is not None:
            return _sum(self._group, bucket, self.plain)
        device = self.wire.device
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[device] if device.type == "cuda" else [])
        self._futures.append((future, bucket.buffer()))
        self.wire.session.donate()  # DDP has no use for a bucket but to be overwritten
        for p, view in zip(bucket.parameters(), bucket.gradients(), strict=True):
            self._views[self._names[id(p)]] = view
        if not self._must_wait:
            self._launch_complete()
        if bucket.is_last():
            self._finish()
        return future

    @property
    def _must_wait(self) -> bool:
        """Some things are known only when the whole gradient is: its norm, an overflow, yesterday's mean."""
        wire = self.wire
        return wire.scaler is not None or wire.session.clips or wire.delayed

    def _grads(self) -> Grads:
        lacking = self._may_lack
        return {
            name: None if lacking and name not in self._touched else self._views.get(name)
            for name in self.wire.parameters
        }

    def _launch_complete(self) -> None:
        wire = self.wire
        launches = wire.session.whole.launches
        while len(self._launched) < len(launches):
            i = len(self._launched)
            names = [name for lane in launches[i] for name in lane.tensors.names]
            if any(name not in self._views for name in names):
                return
            self._launched.append(self._launch(i, self._grads()))

    def _launch(self, i: int, grads: Grads) -> ThreadFuture[Heard]:
        wire = self.wire
        return wire.ferry.board(lambda: drive(wire.session.launch(i, grads), wire.link, wire.clock))

    def _finish(self) -> None:
        futures, grads, views, launched = self._futures, self._grads(), self._views, self._launched
        work = partial(self._judge, launched, grads)
        if self._must_wait:
            # DDP drops what is handed back for a parameter that nobody used today: then wait and see who did.
            work = partial(self.wire.agree_on, grads, patient=self._may_lack)
        self._begin()
        completed = self.wire.ferry.board(partial(self._complete, futures, views, work))
        # DDP, in C++, would only say that an error is no tensor. It queues its own last words when this hook returns.
        _at_the_end(lambda: _at_the_end(completed.result))

    def _judge(self, launched: list[ThreadFuture[Heard]], grads: Grads) -> Verdict:
        """The verdict on launches that are all on their way."""
        heard = [launch.result() for launch in launched]
        return drive(self.wire.session.judge(heard, grads), self.wire.link, self.wire.clock)

    def _complete(
        self,
        futures: list[tuple[torch.futures.Future[Tensor], Tensor]],
        views: dict[str, Tensor],
        work: Callable[[], Verdict],
    ) -> None:
        try:
            for name, update in work().updates.items():
                if update.data_ptr() != views[name].data_ptr():  # else it was written there
                    views[name].copy_(update)
        finally:
            for future, buffer in futures:
                future.set_result(buffer)  # also after an error, which the user's backward() raises at its end


def _sum(group: dist.ProcessGroup, bucket: GradBucket, dtype: torch.dtype) -> torch.futures.Future[Tensor]:
    """The mean of a bucket, added up in some format; torch's own hook for bfloat16 refuses gloo, which can do it."""
    if dtype == bucket.buffer().dtype:
        return allreduce_hook(group, bucket)
    buffer = bucket.buffer()
    said = buffer.to(dtype).div_(group.size())
    work = dist.all_reduce(said, group=group, async_op=True)
    assert work is not None
    done: torch.futures.Future[Tensor] = work.get_future().then(lambda heard: buffer.copy_(heard.value()[0]))
    return done


def _at_the_end(work: Callable[[], None]) -> None:
    """Do something when the current backward pass is over, after all that was queued before; it may raise."""
    torch.autograd.Variable._execution_engine.queue_callback(work)


def hook(state: Courier, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The function that DDP calls, in every backward pass, for every bucket."""
    return state.receive(bucket)


def attach(wire: Wire, ddp: DistributedDataParallel) -> Courier:
    """Hand DDP's gradients to a wire from now on."""
    courier = Courier(wire, ddp)
    ddp.register_comm_hook(courier, hook)
    return courier
