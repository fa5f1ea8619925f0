"""DDP's door: a communication hook that takes gradients as backward delivers them.

DDP's buckets only deliver: what is compressed with what is the plan's business, so it does not matter that DDP
rebuilds its buckets after the first step, and the hook computes what the plain loop computes. A launch leaves as soon
as its last gradient has arrived, and travels while backward goes on. All futures complete together, at the end, because
only then is it known that no rank saw a bad gradient; DDP waits for all of them there anyway.

Where gradients stay on a GPU (NCCL), the host waits for nothing: it queues everything up, and the GPU itself undoes a
step that turns out bad. Every rank has all its gradients there, or DDP would have complained. And since a launch does
the same thing at every step, it is recorded, and repeated (`sync/recording.py`).
"""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with the types themselves.

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future as ThreadFuture
from functools import partial
from typing import NamedTuple, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from gradwire.engine.plan import Plan
from gradwire.engine.recording import Recorder, graphs_on
from gradwire.engine.session import Grads, Heard, Places, Verdict
from gradwire.integrations.comm_worker import CompletedFuture
from gradwire.integrations.wire import Wire, copy_

T = TypeVar("T")
Pending: TypeAlias = ThreadFuture[T] | CompletedFuture[T]


def find_ddp(model: nn.Module) -> DistributedDataParallel | None:
    """The model itself, or the DDP module that torch.compile wrapped."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, DistributedDataParallel) else None


class Delivery(NamedTuple):
    """What one bucket brings: its buffer, whose gradients lie where in it, and how many of them each launch awaits."""

    buffer: Tensor
    views: dict[str, Tensor]
    awaited: Counter[int]


class DDPHookState:
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
        self._known: dict[int, Delivery] = {}  # by number of a bucket
        self._places: dict[int, Places] = {}  # by number of a launch
        self._recorder: Recorder | None = None
        self._plan: Plan | None = None
        self._begin()
        if self._may_lack:
            for name, p in wire.parameters.items():
                p.register_post_accumulate_grad_hook(lambda _, name=name: self._touched.add(name))

    def _begin(self) -> None:
        self._views: dict[str, Tensor] = {}
        self._futures: list[tuple[torch.futures.Future[Tensor], Tensor]] = []
        self._launched: list[Pending[Heard]] = []
        self._touched.clear()

    def receive(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Take one bucket; its future completes when the whole step is agreed on."""
        if self.plain is not None:
            return _sum(self._group, bucket, self.plain)
        device = self.wire.device
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[device] if device.type == "cuda" else [])
        if not self._futures:
            self._prepare()
        delivery = self._delivery(bucket)
        self._futures.append((future, delivery.buffer))
        self._views |= delivery.views
        for i, number in delivery.awaited.items():
            self._missing[i] -= number
        if not self._must_wait:
            self._launch_complete()
        if bucket.is_last():
            self._finish()
        return future

    def _prepare(self) -> None:
        """The first bucket of a step is here."""
        wire = self.wire
        # Some things are known only when the whole gradient is: its norm, an overflow, yesterday's mean.
        self._must_wait = wire.scaler is not None or wire.session.clips or wire.delayed
        wire.session.ahead = wire.may_lead and not self._may_lack and not self._must_wait
        wire.session.donate()  # DDP has no use for a bucket but to be overwritten
        if wire.session.whole is not self._plan:
            self._plan = wire.session.whole
            self._known.clear()
            self._places.clear()
            self._recorder = Recorder(wire.session, wire.link, wire.clock, wire.hold, graphs_on(wire.device))
            names = [[name for lane in launch for name in lane.tensors.names] for launch in self._plan.launches]
            self._launch_of = {name: i for i, mine in enumerate(names) for name in mine}
            self._awaited = [len(mine) for mine in names]
        self._missing = list(self._awaited)

    def _delivery(self, bucket: GradBucket) -> Delivery:
        """What is in a bucket. DDP keeps its buckets until it makes others."""
        buffer, number = bucket.buffer(), bucket.index()
        known = self._known.get(number)
        if known is None or known.buffer.data_ptr() != buffer.data_ptr() or known.buffer.numel() != buffer.numel():
            if known is not None:
                self._known.clear()
                self._places.clear()
                if self._recorder is not None:
                    self._recorder.forget()
            pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
            views = {self._names[id(p)]: view for p, view in pairs}
            known = self._known[number] = Delivery(buffer, views, Counter(self._launch_of[name] for name in views))
        return known

    def _board(self, work: Callable[[], T]) -> Pending[T]:
        """Do some work beside backward, in order."""
        ferry = self.wire.ferry
        return ferry.queue(work) if self.wire.session.ahead else ferry.board(work)

    def _grads(self) -> Grads:
        if self.wire.session.ahead:
            return self._views
        lacking = self._may_lack
        return {
            name: None if lacking and name not in self._touched else self._views.get(name)
            for name in self.wire.parameters
        }

    def _launch_complete(self) -> None:
        while len(self._launched) < len(self._missing) and not self._missing[len(self._launched)]:
            self._launched.append(self._launch(len(self._launched), self._grads()))

    def _launch(self, i: int, grads: Grads) -> Pending[Heard]:
        wire = self.wire
        if not wire.session.ahead:
            return self._board(lambda: wire.hold(wire.session.launch(i, grads)))
        recorder, places = self._recorder, self._places.get(i) or self._flats(i)
        assert recorder is not None
        self._places[i] = places
        return self._board(lambda: recorder.launch(i, grads, places))

    def _flats(self, i: int) -> Places:
        lanes = self.wire.session.plan.launches[i]
        found = [[self._views[name].view(-1) for name in lane.tensors.names] for lane in lanes]
        return Places(found, all(x.dtype == torch.float32 for lane in found for x in lane))

    def _finish(self) -> None:
        futures, grads, views, launched = self._futures, self._grads(), self._views, self._launched
        work = partial(self._judge, launched, grads)
        if self.wire.session.ahead:
            self._begin()
            self._promise(partial(self._trust, futures, launched))
            return
        if self._must_wait:
            # DDP drops what is handed back for a parameter that nobody used today: then wait and see who did.
            work = partial(self.wire.agree_on, grads, patient=self._may_lack)
        self._begin()
        self._promise(partial(self._complete, futures, views, work))

    def _promise(self, work: Callable[[], None]) -> None:
        completed = self._board(work)
        # DDP, in C++, would only say that an error is no tensor. It queues its own last words when this hook returns.
        _at_the_end(lambda: _at_the_end(completed.result))

    def _judge(self, launched: list[Pending[Heard]], grads: Grads) -> Verdict:
        """The verdict on launches that are all on their way."""
        heard = [launch.result() for launch in launched]
        return self.wire.hold(self.wire.session.judge(heard, grads))

    def _trust(
        self, futures: list[tuple[torch.futures.Future[Tensor], Tensor]], launched: list[Pending[Heard]]
    ) -> None:
        """What was agreed on lies where the gradients were; if the step is dropped, the device makes zeros of it."""
        assert self._recorder is not None
        try:
            self._recorder.conclude([launch.result() for launch in launched], [buffer for _, buffer in futures])
        finally:
            for future, buffer in futures:
                future.set_result(buffer)

    def _complete(
        self,
        futures: list[tuple[torch.futures.Future[Tensor], Tensor]],
        views: dict[str, Tensor],
        work: Callable[[], Verdict],
    ) -> None:
        try:
            copy_(views, work().updates)
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


def hook(state: DDPHookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The function that DDP calls, in every backward pass, for every bucket."""
    return state.receive(bucket)


def attach(wire: Wire, ddp: DistributedDataParallel) -> DDPHookState:
    """Hand DDP's gradients to a wire from now on."""
    courier = DDPHookState(wire, ddp)
    try:
        ddp.register_comm_hook(courier, hook)
    except RuntimeError as wrong:
        if "once" not in str(wrong):
            raise
        raise RuntimeError(
            "this DistributedDataParallel has a communication hook already, and takes no second one; compress it once, "
            "change the spec with wire.set(...), or wrap the module anew"
        ) from wrong
    return courier
