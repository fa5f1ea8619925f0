"""`DistributedOptimizer`, as in Horovod: wrap an optimizer, and its ``step()`` synchronizes first."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gradwire.comm.backend import Backend
from gradwire.comm.host_layout import Across
from gradwire.core.renamed import renamed_argument
from gradwire.engine import Plan, Spec
from gradwire.integrations import grad_scaler
from gradwire.integrations.adamw_checks import check_optimizer
from gradwire.integrations.adamw_moments import attach_optimizer, check_same
from gradwire.integrations.auto import described_link
from gradwire.integrations.consistency import errors_on_all_ranks, find_backend
from gradwire.integrations.ddp import make_wire
from gradwire.integrations.entry_point import WRAPPED_OPTIMIZER, EntryPoint
from gradwire.integrations.model import refuse_unfrozen, trainable
from gradwire.integrations.optimizer_warning import is_adaptive, warn_if_starved
from gradwire.integrations.ownership import check_order, is_registered, refuse_averaged, refuse_local, register_wire
from gradwire.integrations.setup import Options, Setup, check_options, check_scaler
from gradwire.integrations.wire import Wire, skip_step
from gradwire.optim import SGD


class DistributedOptimizer(Optimizer):
    """A real optimizer: schedulers and GradScaler take it as they take the one inside; groups and state are shared.

    All ranks start with the parameters of rank 0, and with its buffers where ``named_buffers`` hands them in. The other
    options are those of `compress`.

    Attributes:
        wire: The handle; ``wire.report()`` and the rest.
    """

    # GradScaler then leaves unscaling and skipping to us: a skip must be decided by all ranks together.
    _step_supports_amp_scaling = True

    @renamed_argument("launch_mb", "bucket_mb")
    def __init__(
        self,
        optimizer: Optimizer,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        spec: Spec,
        *,
        named_buffers: Iterable[tuple[str, torch.Tensor]] = (),
        scaler: torch.amp.GradScaler | None = None,
        process_group: dist.ProcessGroup | None = None,
        across: Across | None = None,
        link: Backend | str | None = None,
        **options: Any,
    ) -> None:
        backend, named = find_backend(link, process_group, across), list(named_parameters)
        with errors_on_all_ranks(backend):
            check_options(WRAPPED_OPTIMIZER.name, options)
            chosen = Options(**options)
            check_scaler(scaler)
            WRAPPED_OPTIMIZER.refuse_local_steps(spec)
            _check_named(optimizer, named)
            parameters = trainable(named)
            _check_covered(optimizer, parameters)
            refuse_averaged(parameters)
            refuse_local(parameters, backend.world)
            described = described_link(spec, link, chosen)
        self.inner = optimizer
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.param_groups = optimizer.param_groups
        self.state = optimizer.state
        fits_optimizer = partial(check_plan, optimizer, parameters, WRAPPED_OPTIMIZER)
        shared = dict((*named, *named_buffers))
        check_model = partial(_check_still_covered, optimizer, named, parameters)
        setup = Setup(parameters, backend, chosen, shared=shared, check_plan=fits_optimizer, check_model=check_model)
        setup.entry = WRAPPED_OPTIMIZER
        self.wire = make_wire(setup, spec, described)
        attach_optimizer(self.wire, optimizer)
        own_gradients(self.wire)
        check_wire(optimizer, self.wire)
        self._scaler = scaler

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Synchronize, then let the inner optimizer step; under a GradScaler, skip on all ranks or none."""
        loss = _loss(closure)
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
                "the optimizer was built without the GradScaler that calls it, and scales of ranks would differ; "
                "build it with DistributedOptimizer(..., scaler=scaler)"
            )
        if not grad_scaler.overflows(self.wire.grads(), self.wire.link, self.wire.device):
            return False
        skip_step(self.wire)
        # A rank whose own gradients were fine must back off as well.
        for flag in self._scaler._found_inf_per_device(self).values():
            flag.fill_(1.0)
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


def refuse_second_momentum(optimizer: Optimizer, plan: Plan, written: Mapping[str, str]) -> None:
    """Refuse an optimizer that applies momentum once more, after the feedback of a spec that is written so."""
    corrects = [lane for lane in plan.lanes if getattr(lane.feedback, "momentum", 0.0) > 0]
    if isinstance(optimizer, SGD) or not corrects:
        return
    name = type(optimizer).__name__
    spec = next((written[one.label] for one in corrects if one.label in written), corrects[0].feedback)
    for group in optimizer.param_groups:
        if "betas" in group:
            raise ValueError(
                f"{name} has momentum of its own, and {spec}, which is for SGD, applies it before compression; use "
                f"'int4' with {name}, or step by gradwire.SGD"
            )
        if group.get("momentum"):
            raise ValueError(
                f"{name} has momentum of its own, and {spec} applies it before compression; build the optimizer with "
                "momentum=0, or use gradwire.SGD"
            )


def check_plan(
    optimizer: Optimizer,
    parameters: Mapping[str, nn.Parameter],
    entry: EntryPoint,
    plan: Plan,
    written: Mapping[str, str],
) -> None:
    """Refuse an optimizer that a plan does not go with; arguments as for `check_optimizer`."""
    refuse_second_momentum(optimizer, plan, written)
    check_optimizer(optimizer, parameters, entry, plan, written)


def check_wire(optimizer: Optimizer, wire: Wire) -> None:
    """The same for an optimizer that may step parameters of a wire; a plan that starves it is warned of.

    Only lanes count that hold what it steps: another optimizer may step the rest.
    """
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    names = {name for name, p in wire.parameters.items() if id(p) in stepped}
    if not names:
        return
    if not wire.setup.hooked and is_registered(wire):
        refuse_averaged(wire.parameters, wire)
    if wire.setup.hooked or is_registered(wire):
        _refuse_unknown_scaler(optimizer, wire)
    plan = wire.engine.full_plan.part(names)
    check_plan(optimizer, wire.parameters, wire.setup.entry, plan, wire.setup.written)
    check_same(optimizer, wire, plan)
    if is_adaptive(optimizer):
        wire.adaptive.add(type(optimizer).__name__)
    if wire.link.rank == 0:
        warn_if_starved(optimizer, plan, wire, wire.setup.entry, alone=len(names) == len(wire.parameters))


def _refuse_unknown_scaler(optimizer: Optimizer, wire: Wire) -> None:
    """Refuse a GradScaler that the wire was not given. Where gradients overflow, it would find zeros."""
    if wire.scaler is None and grad_scaler.has_scaler(optimizer):
        raise ValueError(
            f"a GradScaler steps {type(optimizer).__name__}, and the wire does not know it, so the scaler would never "
            f"back off; write {wire.setup.entry.name}(..., scaler=scaler)"
        )


def check_at_first_step(wire: Wire) -> None:
    """The same for optimizers that are not known yet: each is checked before its first step."""
    _checked[wire] = weakref.WeakKeyDictionary()
    _register_hook()


def own_gradients(wire: Wire) -> None:
    """Check optimizers, and let the wire alone average its gradients, once before each step."""
    if not wire.setup.hooked or wire.setup.sharded:
        register_wire(wire)
    check_at_first_step(wire)


# By optimizer: the plan, whether it had stepped, and how many parameters it had.
_Plans: TypeAlias = weakref.WeakKeyDictionary[Optimizer, tuple[Plan, bool, int]]
_checked: weakref.WeakKeyDictionary[Wire, _Plans] = weakref.WeakKeyDictionary()


@lru_cache(maxsize=1)
def _register_hook() -> None:
    """Once, and for good: torch iterates over its hooks, and none may be removed meanwhile."""
    register_optimizer_step_pre_hook(_check_wires)


def _check_wires(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """Check an optimizer that is about to step against the plans of all wires.

    Once each, once it has stepped, and once it has got more parameters.
    """
    if torch.compiler.is_compiling() or isinstance(optimizer, DistributedOptimizer):
        return
    has_stepped, count = bool(optimizer.state), sum(len(group["params"]) for group in optimizer.param_groups)
    for reference in _checked.keyrefs():
        wire = reference()
        if wire is None or not wire.is_attached:
            continue
        plan = wire.executor.engine.full_plan
        before, *others = _checked[wire].get(optimizer, (None,))
        if before is not plan or others != [has_stepped, count]:
            check_wire(optimizer, wire)
            _checked[wire][optimizer] = plan, has_stepped, count
        check_order(wire, optimizer)


def _check_named(optimizer: object, named: Sequence[object]) -> None:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"{type(optimizer).__name__} is no torch optimizer; wrap the one that steps the parameters")
    if isinstance(optimizer, DistributedOptimizer):
        raise ValueError("a DistributedOptimizer averages gradients already; wrap the optimizer inside, once")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError("LBFGS takes several gradients in a step, and only one is synchronized; wrap another optimizer")
    for one in named:
        if not (isinstance(one, tuple) and len(one) == 2 and isinstance(one[0], str)):
            raise TypeError(
                f"named_parameters takes pairs of a name and a parameter, and {type(one).__name__} is none; "
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


def _check_still_covered(
    optimizer: Optimizer, named: Iterable[tuple[str, nn.Parameter]], parameters: Mapping[str, nn.Parameter]
) -> None:
    refuse_unfrozen(named, {id(p) for p in parameters.values()})
    _check_covered(optimizer, parameters)


def _loss(closure: Callable[[], float] | None) -> float | None:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
