"""The optimizer's door, Horovod-style: wrap an optimizer, and its ``step()`` synchronizes first."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gradwire.comm.backend import Backend
from gradwire.comm.host_layout import Across
from gradwire.comm.torch_backend import connect
from gradwire.engine.method import Spec
from gradwire.engine.plan import LAUNCH_BYTES, Plan, Rule
from gradwire.exchanges import Exchange
from gradwire.feedback import Feedback, MomentumCorrection
from gradwire.integrations import scaling
from gradwire.integrations.auto import described_link
from gradwire.integrations.consistency import telling
from gradwire.integrations.ddp import make_wire
from gradwire.integrations.host_discovery import arrange
from gradwire.integrations.model import trainable
from gradwire.integrations.wire import Wire


class DistributedOptimizer(Optimizer):
    """A real optimizer: schedulers and GradScaler take it as they take the one inside; groups and state are shared.

    All ranks start with the parameters of rank 0, and with its buffers where ``named_buffers`` hands them in. The other
    options are those of `compress`.

    Attributes:
        wire: The handle; ``wire.report()`` and the rest.
    """

    # GradScaler then leaves unscaling and skipping to us: a skip must be decided by all ranks together.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        optimizer: Optimizer,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        spec: Spec,
        *,
        named_buffers: Iterable[tuple[str, torch.Tensor]] = (),
        feedback: str | Feedback | None = None,
        exchange: str | Exchange | None = None,
        granularity: str = "layer",
        rules: Sequence[Rule] = (),
        bundle: str | None = "fp16",
        scaler: torch.amp.GradScaler | None = None,
        process_group: dist.ProcessGroup | None = None,
        seed: int = 0,
        launch_mb: float = LAUNCH_BYTES / 2**20,
        rollback: bool = True,
        across: Across | None = None,
        link: Backend | str | None = None,
    ) -> None:
        mover, named = link if isinstance(link, Backend) else connect(process_group), list(named_parameters)
        mover, text = arrange(mover, across), link if isinstance(link, str) else None
        with telling(mover):
            _check_named(optimizer, named)
            parameters = trainable(named)
            _check_covered(optimizer, parameters)
            described = described_link(spec, text, feedback, exchange)
        self.inner = optimizer
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.param_groups = optimizer.param_groups
        self.state = optimizer.state
        options: dict[str, Any] = {
            "granularity": granularity,
            "rules": rules,
            "bundle": bundle,
            "seed": seed,
            "launch_bytes": int(launch_mb * 2**20),
            "rollback": rollback,
            "shared": dict((*named, *named_buffers)),
            "veto": partial(refuse_second_momentum, optimizer),
        }
        self.wire = make_wire(parameters, mover, spec, described, None, feedback=feedback, exchange=exchange, **options)
        self._scaler = scaler

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Synchronize, then let the inner optimizer step; under a GradScaler, skip on all ranks or none."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._synchronize():
            self.inner.step()
        return loss

    def _synchronize(self) -> bool:
        if getattr(self, "found_inf", None) is not None and self._overflown():
            return False
        scale = getattr(self, "grad_scale", None)
        if scale is not None:
            self._unscale_(scale)
        self.wire()
        return True

    def _overflown(self) -> bool:
        if self._scaler is None:
            raise ValueError(
                "a GradScaler is at work that the optimizer was not told of, and the ranks' scales would drift apart; "
                "build it with DistributedOptimizer(..., scaler=scaler)"
            )
        engine = self.wire.engine
        if not scaling.overflows(self.wire.grads(), self.wire.link, self.wire.device):
            return False
        engine.drop()
        # A rank whose own gradients were fine must back off as well.
        for found in self._scaler._found_inf_per_device(self).values():
            found.fill_(1.0)
        return True

    def _unscale_(self, scale: torch.Tensor) -> None:
        inverse = scale.double().reciprocal().float()
        for p in self.wire.parameters.values():
            if p.grad is not None:
                p.grad.mul_(inverse.to(p.grad.device))

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state; the wire's is `wire.state_dict()`."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "wire"):
            raise ValueError("a wrapped optimizer cannot grow: add the parameters first, then wrap it")
        super().add_param_group(param_group)


def refuse_second_momentum(optimizer: Optimizer, plan: Plan) -> None:
    """Momentum before compression and again after it is not what anybody wants."""
    if isinstance(optimizer, SGD) or not _corrects(plan):
        return
    for group in optimizer.param_groups:
        if group.get("momentum") or "betas" in group:
            raise ValueError(
                f"{type(optimizer).__name__} has momentum of its own, and momentum correction applies it before "
                "compression; build the optimizer with momentum=0, or use gradwire.SGD"
            )


def refuse_at_first_step(wire: Wire) -> None:
    """The same where nobody has shown us the optimizer: it shows itself when it steps, before it changes anything."""
    _fitting[wire] = weakref.WeakKeyDictionary()
    _watch()


_fitting: weakref.WeakKeyDictionary[Wire, weakref.WeakKeyDictionary[Optimizer, Plan]] = weakref.WeakKeyDictionary()


@lru_cache(maxsize=1)
def _watch() -> None:
    """Once, and for good: torch walks through its hooks, and none may go meanwhile."""
    register_optimizer_step_pre_hook(_look)


def _look(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """Compare an optimizer that is about to step with the plans of all wires that it serves, once each."""
    if torch.compiler.is_compiling():
        return
    for held in _fitting.keyrefs():
        wire = held()
        if wire is None or _fitting[wire].get(optimizer) is (plan := wire.engine.whole):
            continue
        mine = {id(p) for p in wire.parameters.values()}
        if any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
            refuse_second_momentum(optimizer, plan)
        _fitting[wire][optimizer] = plan


def _corrects(plan: Plan) -> bool:
    return any(isinstance(lane.feedback, MomentumCorrection) and lane.feedback.momentum > 0 for lane in plan.lanes)


def _check_named(optimizer: object, named: Sequence[object]) -> None:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"{type(optimizer).__name__} is no torch optimizer; wrap the one that steps the parameters")
    for one in named:
        if not (isinstance(one, tuple) and len(one) == 2 and isinstance(one[0], str)):
            raise TypeError(
                f"parameters come with their names, and {type(one).__name__} is no such pair; "
                "pass model.named_parameters()"
            )


def _check_covered(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
    known = {id(p) for p in parameters.values()}
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.requires_grad and id(p) not in known:
                raise ValueError(
                    f"the optimizer holds a parameter of shape {tuple(p.shape)} that named_parameters does not name; "
                    "pass model.named_parameters() of the same model"
                )


class SGD(Optimizer):
    """SGD for updates that carry momentum already, as `momentum_correction` hands them out.

    Weight decay stays local and uncompressed. It has a momentum buffer of its own, so that it is as strong as in
    momentum SGD: with ``d = momentum * d + weight_decay * p``, a step is ``p -= lr * (update + d)``.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov}
        super().__init__(params, defaults)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Apply the updates that lie in ``p.grad``."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            held = [(p, p.grad) for p in group["params"] if p.grad is not None]
            if not held:
                continue
            params, updates = [p.data for p, _ in held], [update for _, update in held]
            if group["weight_decay"]:
                updates = list(torch._foreach_add(updates, self._decay([p for p, _ in held], params, group)))
            torch._foreach_add_(params, updates, alpha=-group["lr"])
        return loss

    def _decay(
        self, owners: list[nn.Parameter], params: list[torch.Tensor], group: dict[str, Any]
    ) -> list[torch.Tensor]:
        today = torch._foreach_mul(params, group["weight_decay"])
        buffers = list(today)
        known = [i for i, p in enumerate(owners) if "decay" in self.state[p]]
        if known:
            old = torch._foreach_mul([self.state[owners[i]]["decay"] for i in known], group["momentum"])
            for i, buffer in zip(known, torch._foreach_add(old, [today[i] for i in known]), strict=True):
                buffers[i] = buffer
        for p, buffer in zip(owners, buffers, strict=True):
            self.state[p]["decay"] = buffer
        if not group["nesterov"]:
            return buffers
        return list(torch._foreach_add(today, torch._foreach_mul(buffers, group["momentum"])))
