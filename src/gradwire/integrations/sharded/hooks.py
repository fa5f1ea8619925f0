"""Hooks of sharded parameters: FSDP reduces a gradient inside the replica, then the wire exchanges it between replicas.

FSDP calls the post-accumulate hooks of a parameter when its shard of the gradient is there. A bucket is sent as soon as
its last gradient has arrived, while backward continues. The step ends when backward ends, before the optimizer sees the
gradients.

Where gradients stay on a GPU (NCCL), the host waits for nothing but the step before: a captured step has all gradients
of this rank, and leaves its status on the device. FSDP allocates new gradients in every step. So captured steps read
them in a buffer, and this module makes `p.grad` a view of it, which holds the update when backward ends.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.engine import BucketResult, Plan
from gradwire.engine.hosts import commits_alone
from gradwire.integrations.ddp import BackwardPass, after_backward
from gradwire.integrations.model import local_part
from gradwire.integrations.wire import Wire, write_missing


class ShardPass(BackwardPass):
    """One backward pass.

    Attributes:
        arrived: How often each gradient has come.
        grads: This rank's part of each of them.
        replaced: The parts as FSDP allocated them, where `p.grad` has become a view of a buffer. Streams may still
            read them until the pass ends.
    """

    def __init__(self, wire: Wire, once: bool) -> None:
        super().__init__(wire, early=once and wire.tuner is None)
        self.arrived: dict[str, int] = {}
        self.grads: dict[str, Tensor] = {}
        self.replaced: list[Tensor] = []


class ShardHooks:
    """Runs a wire's step in every backward pass.

    Args:
        wire: Whose parameters get hooks.
        model: Whose they are.
        param_groups: FSDP's.
    """

    def __init__(self, wire: Wire, model: nn.Module, param_groups: Sequence[Any]) -> None:
        self.wire = wire
        self._group_of = {id(x.sharded_param): group for group in param_groups for x in group.fsdp_params}
        self._pass: ShardPass | None = None
        self._once = False  # whether each gradient came once in the last pass; a module may run several times
        hooked = wire.parameters.items()
        self._handles = [p.register_post_accumulate_grad_hook(partial(self._arrive, name)) for name, p in hooked]
        self._handles.append(model.register_forward_pre_hook(lambda *_: self._refuse_failed_pass()))

    def remove(self) -> None:
        """Leave gradients alone from now on."""
        for handle in self._handles:
            handle.remove()

    @property
    def _plan(self) -> Plan:
        return self.wire.executor.engine.full_plan

    def _refuse_failed_pass(self) -> None:
        """Refuse a forward pass after a backward pass that raised an error midway.

        FSDP's callbacks and ours have not run then, and later gradients would not be averaged.
        """
        if self._pass is not None and torch.is_grad_enabled():
            raise RuntimeError(
                "the last backward pass of this sharded model did not end, and FSDP cannot continue after that; start "
                "all ranks again from the last checkpoint"
            )

    def _arrive(self, name: str, p: Tensor) -> None:
        """A shard of a gradient is there."""
        group = self._group_of.get(id(p))
        if group is not None and not group.all_reduce_grads:
            return  # set_requires_all_reduce(False): gradients add up until a later pass
        now = self._pass = self._pass or self._begin()
        times = now.arrived[name] = now.arrived.get(name, 0) + 1
        bucket = self._plan.bucket_of.get(name)
        if bucket is None or p.grad is None:  # this rank's shard is empty, or has no gradient
            return
        if times > 1:
            self._refuse_sent(now, name, bucket)
            return
        now.grads[name] = _part_like(p, p.grad)
        now.missing[bucket] -= 1
        while not now.missing[bucket] and now.is_next_complete:
            self._send(now)

    def _begin(self) -> ShardPass:
        """The first gradient of a backward pass is here."""
        now = ShardPass(self.wire, self._once)
        if now.early:
            self.wire.before_step()
        after_backward(lambda: after_backward(self._finish))  # FSDP's own last callback may bring more gradients
        return now

    def _send(self, now: ShardPass) -> None:
        """Start the exchange of the next bucket."""
        wire, i = self.wire, len(now.results)
        if wire.setup.stays_on_device:
            # A thread would start collectives between FSDP's own, in another order on each rank: NCCL may deadlock.
            now.results.append(wire.worker.enqueue(partial(self._run_bucket, now, i)))
        else:
            now.results.append(wire.worker.submit(partial(wire.executor.run_bucket, i, now.grads)))

    def _run_bucket(self, now: ShardPass, i: int) -> BucketResult:
        """Compress and exchange a bucket. Its gradients become views of a buffer, if captured work reads them there."""
        names, executor = self._plan.bucket_names[i], self.wire.executor
        grads = [self.wire.parameters[name].grad for name in names]
        if all(
            getattr(grad, "_local_tensor", None) is now.grads[name] for name, grad in zip(names, grads, strict=True)
        ):
            views = executor.take_in(i, now.grads)
            for name, grad, view in zip(names, grads, views or (), strict=views is not None):
                now.replaced.append(now.grads[name])
                now.grads[name] = grad._local_tensor = view  # type: ignore[union-attr]
        return executor.run_bucket(i, now.grads)

    def _refuse_sent(self, now: ShardPass, name: str, bucket: int) -> None:
        """Refuse a gradient that comes again after it was sent."""
        if bucket < len(now.results):
            raise RuntimeError(
                f"the gradient of {name!r} came twice in one backward pass, and once in the pass before, so it was "
                "sent too early; run the module equally often in each pass, or attach again"
            )

    def _finish(self) -> None:
        """The backward pass is over: exchange what is left, and commit."""
        now, self._pass, wire = self._pass, None, self.wire
        assert now is not None
        self._once = max(now.arrived.values()) == 1
        grads = {name: now.grads[name] if name in now.grads else _part(p) for name, p in wire.parameters.items()}
        if now.early:
            wire.setup.check_model()
            complete = commits_alone(wire.executor.engine)
            result = wire.worker.run(partial(now.commit, wire.executor, grads, complete))
        else:
            result = wire.sync(grads)
        if any(grad is None for grad in grads.values()):
            write_missing(wire.parameters, result)
        now.replaced.clear()  # the current stream has waited for all that reads them


def _part(p: Tensor) -> Tensor | None:
    """What this rank has of a parameter's gradient."""
    return None if p.grad is None else local_part(p.grad)


def _part_like(p: Tensor, grad: Tensor) -> Tensor:
    """The same of a gradient that has just come. A host spends milliseconds a step on `to_local` of all parameters."""
    part = getattr(grad, "_local_tensor", None)
    return local_part(grad) if part is None or grad.placements != p.placements else part  # type: ignore[attr-defined]
