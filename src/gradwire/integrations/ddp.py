"""DDP: a communication hook that takes gradients as backward delivers them.

DDP's buckets only bring gradients: the plan decides what is compressed together. So it does not matter that DDP
rebuilds its buckets after the first step, and the hook computes what the plain loop computes. A bucket of the plan is
sent as soon as its last gradient has arrived, while backward continues. All futures complete together, at the end,
because only then is it known that no rank had a bad gradient; DDP waits for all of them there anyway.

Where gradients stay on a GPU (NCCL), the host waits for nothing but the step before: every rank has all its gradients,
or DDP would have raised an error, so captured steps leave their status on the device.
"""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with the types themselves.

import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed._composable.contract import _get_registry
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from gradwire.comm.rates import LinkSpec
from gradwire.core.layout import same_memory, without_gaps
from gradwire.engine import BucketResult, Grads, Plan, Spec, StepResult
from gradwire.engine.cuda_graphs import StepExecutor
from gradwire.engine.gradients import FixedGrads
from gradwire.integrations.auto import AUTO, find_tuner
from gradwire.integrations.comm_worker import AnyFuture, T
from gradwire.integrations.model import refuse_join
from gradwire.integrations.setup import Setup
from gradwire.integrations.wire import Wire


def find_ddp(model: nn.Module) -> DistributedDataParallel | None:
    """The model itself, or the DDP module that torch.compile wrapped."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, DistributedDataParallel) else None


def find_replicated(model: nn.Module) -> DistributedDataParallel | None:
    """The DistributedDataParallel by which `replicate` averages a model. Its first forward pass would make it."""
    module = getattr(model, "_orig_mod", model)
    state = replicate.state(module) if _is_replicated(module) else None
    if state is None:  # or FSDP's function of the same name
        return None
    if not state.has_initialized:
        state.lazy_init()
    ddp: DistributedDataParallel = state._ddp
    return ddp


def _is_replicated(module: nn.Module) -> bool:
    return isinstance(module, nn.Module) and "replicate" in (_get_registry(module) or ())


def refuse_replicated(model: nn.Module) -> None:
    """Refuse a part of a model that `replicate` averages, and the rest not."""
    for name, module in model.named_modules():
        if _is_replicated(module):
            raise ValueError(
                f"the module {name!r} is under replicate(), which averages its gradients by itself; pass that module "
                "to gradwire, or leave it unwrapped"
            )


class BucketInfo(NamedTuple):
    """What one bucket of DDP brings: its buffer, and how many gradients of each bucket of the plan."""

    buffer: Tensor
    gradient_counts: dict[int, int]


class BackwardPass:
    """The gradients of one backward pass, as far as they have arrived.

    Attributes:
        early: Whether buckets are sent as soon as they are complete. Some things need the whole gradient first: its
            norm, an overflow, the mean of the step before.
        missing: How many gradients each bucket still awaits.
        results: Results of the buckets that were sent.
    """

    def __init__(self, wire: Wire, early: bool = True) -> None:
        engine = wire.executor.engine
        self.early = early and not (wire.scaler is not None or engine.unwrapped.clips or wire.delays)
        self.missing = list(map(len, engine.full_plan.bucket_names))
        self.results: list[AnyFuture[BucketResult]] = []

    @property
    def is_next_complete(self) -> bool:
        """Whether the next bucket can be sent. Buckets are sent in order, which is the same on all ranks."""
        sent = len(self.results)
        return self.early and sent < len(self.missing) and not self.missing[sent]

    def commit(self, executor: StepExecutor, grads: Grads, complete: bool) -> StepResult:
        """Run the buckets that were not sent yet, and end the step."""
        results = [pending.result() for pending in self.results]
        results += [executor.run_bucket(i, grads) for i in range(len(results), len(self.missing))]
        return executor.finish(results, grads, complete)


class DDPPass(BackwardPass):
    """One of DistributedDataParallel.

    Attributes:
        complete: Whether all ranks have all their gradients.
        threaded: Whether the work is done by the worker's thread: it waits for messages, or is replayed, where the
            host's part of it would delay the launches of backward.
    """

    def __init__(self, wire: Wire, may_lack: bool) -> None:
        super().__init__(wire)
        self.complete = not may_lack and wire.scaler is None
        self.threaded = wire.executor.replayed or not wire.setup.stays_on_device
        self.checked: AnyFuture[None] | None = None
        self.futures: list[tuple[torch.futures.Future[Tensor], Tensor]] = []


class DDPHookState:
    """One backward pass after the other: collects gradients, runs buckets, and completes DDP's futures.

    Attributes:
        dense_dtype: In what format to add gradients up as DDP does without a hook, if so.
    """

    def __init__(self, wire: Wire, ddp: DistributedDataParallel) -> None:
        self.wire = wire
        self.dense_dtype: torch.dtype | None = None
        self._ddp, self._group = weakref.ref(ddp), ddp.process_group  # garbage collection does not see DDP's hook
        self._names = {id(p): name for name, p in wire.parameters.items()}
        self._may_lack = bool(ddp.find_unused_parameters or ddp.static_graph)
        self._touched: set[str] = set()
        self._known: dict[int, BucketInfo] = {}  # by number of a bucket
        self._views = FixedGrads(dict.fromkeys(wire.parameters))  # where gradients lie in DDP's buckets
        self._plan: Plan | None = None
        self._pass: DDPPass | None = None
        if self._may_lack:
            for name, p in wire.parameters.items():
                p.register_post_accumulate_grad_hook(lambda _, name=name: self._touched.add(name))

    def receive(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Take one bucket; its future completes when the whole step is committed. DDP calls this in every pass."""
        refuse_join(self._ddp())
        if self.dense_dtype is not None:
            return _sum(self._group, bucket, self.dense_dtype)
        each_waits = self.wire.device.type == "cuda" and not self._waits_once
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[self.wire.device] if each_waits else [])
        now = self._pass = self._pass or self._begin()
        info = self._info(bucket)
        now.futures.append((future, info.buffer))
        for i, number in info.gradient_counts.items():
            now.missing[i] -= number
        while now.is_next_complete:
            bucket_step = partial(self.wire.executor.run_bucket, len(now.results), self._grads())
            now.results.append(self._start(now, bucket_step))
        if bucket.is_last():
            self._finish(now)
        return future

    def _begin(self) -> DDPPass:
        """Begin a step: its first bucket has arrived."""
        self.wire.before_step()
        plan = self.wire.executor.engine.full_plan
        if plan is not self._plan:
            self._plan = plan
            self._known.clear()
        now = DDPPass(self.wire, self._may_lack)
        now.checked = self._start(now, self.wire.setup.check_model)
        return now

    def _info(self, bucket: GradBucket) -> BucketInfo:
        """What is in a bucket. DDP keeps its buckets until it makes others."""
        buffer, number = bucket.buffer(), bucket.index()
        known = self._known.get(number)
        if known is None or not same_memory(known.buffer, buffer) or known.buffer.numel() != buffer.numel():
            if known is not None:
                self._known.clear()
            pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
            views = {self._names[id(p)]: _as_laid_out(view, p) for p, view in pairs}
            assert self._plan is not None
            gradient_counts = Counter(map(self._plan.bucket_of.__getitem__, views))
            known = self._known[number] = BucketInfo(buffer, gradient_counts)
            self._views = FixedGrads({**self._views, **views})
        return known

    def _start(self, now: DDPPass, work: Callable[[], T]) -> AnyFuture[T]:
        """Do some work while backward continues, in order."""
        return self.wire.worker.submit(work) if now.threaded else self.wire.worker.enqueue(work)

    def _grads(self) -> Grads:
        """The gradients of buckets that have arrived. Others are not to be read: they are of the step before."""
        if not self._may_lack:
            return self._views
        return {name: view if name in self._touched else None for name, view in self._views.items()}

    def _finish(self, now: DDPPass) -> None:
        grads = self._grads()
        self._pass = None
        self._touched.clear()
        if now.early:
            work = partial(now.commit, self.wire.executor, grads, now.complete)
        else:
            # DDP drops the update of a parameter that no rank used in this step, so wait until that is known.
            work = partial(self.wire.sync, grads, wait=self._may_lack)
        # Where updates go of gradients that are not there.
        missing = FixedGrads() if now.early and now.complete else self._views
        completed = self._start(now, partial(self._complete, now, missing, work))
        after_backward(partial(self._join, completed))

    @property
    def _waits_once(self) -> bool:
        """Whether the stream waits once for all updates, and not for the future of each bucket.

        Of a static graph, DDP reads the updates before any callback of ours. With `auto`, DDP's own times are read, and
        DDP takes what a callback of ours waits for as computing.
        """
        return self.wire.device.type == "cuda" and not self._may_lack and self.wire.tuner is None

    def _join(self, completed: AnyFuture[None]) -> None:
        """Backward is over: have its stream wait for the updates, once for all buckets, before DDP reads them.

        DDP hides an exception of the hook: raise it from a callback that is queued after DDP's own.
        """
        if self._waits_once:
            completed.exception()
            self.wire.worker.join()
        after_backward(completed.result)

    def _complete(self, now: DDPPass, views: FixedGrads, work: Callable[[], StepResult]) -> None:
        try:
            assert now.checked is not None
            now.checked.result()
            updates = work().updates
            for name, view in views.items():
                # If they differ, it has no gradient on this rank.
                if view is not None and name in updates and not same_memory(updates[name], view):
                    view.copy_(updates[name])
        finally:
            for future, buffer in now.futures:
                future.set_result(buffer)  # also after an error, which the user's backward() raises at its end


def _sum(group: dist.ProcessGroup, bucket: GradBucket, dtype: torch.dtype) -> torch.futures.Future[Tensor]:
    """The mean of a bucket, added up in some format; torch's own hook for bfloat16 refuses gloo, which can do it."""
    if dtype == bucket.buffer().dtype:
        return allreduce_hook(group, bucket)
    buffer = bucket.buffer()
    work = dist.all_reduce(buffer.to(dtype).div_(group.size()), group=group, async_op=True)
    assert work is not None
    done: torch.futures.Future[Tensor] = work.get_future().then(lambda total: buffer.copy_(total.value()[0]))
    return done


def _as_laid_out(view: Tensor, p: Tensor) -> Tensor:
    """A gradient in a bucket, which DDP fills in the order of the parameter's memory where that has no gaps."""
    return view.as_strided(p.shape, p.stride()) if without_gaps(p) else view


def after_backward(work: Callable[[], None]) -> None:
    """Do something when the current backward pass is over, after all that was queued before; it may raise."""
    torch.autograd.Variable._execution_engine.queue_callback(work)


def attach(wire: Wire, ddp: DistributedDataParallel) -> DDPHookState:
    """From now on, have a wire average DDP's gradients."""
    state = DDPHookState(wire, ddp)
    try:
        ddp.register_comm_hook(state, DDPHookState.receive)
    except RuntimeError as wrong:
        if "once" not in str(wrong):
            raise
        raise RuntimeError(
            "this DistributedDataParallel has a communication hook already, and takes no second one; compress it once, "
            "change the spec with wire.set(...), or wrap the module again"
        ) from wrong
    return state


def make_wire(
    setup: Setup, spec: Spec, described: LinkSpec | None = None, ddp: DistributedDataParallel | None = None
) -> Wire:
    """A wire, attached to DDP if there is one; with the spec ``auto``, dense until a tuner decides."""
    if spec == AUTO:
        tuner = find_tuner()
        setup.note = "" if described is None else f"; a link of {described}"
        wire = Wire(setup, "fp32")
        wire.tuner = tuner(wire, ddp, described)
        return wire
    wire = Wire(setup, spec)
    if ddp is not None:
        attach(wire, ddp)
    return wire
