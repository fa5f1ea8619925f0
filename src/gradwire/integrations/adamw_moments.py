"""AdamW moments: what a wire takes from AdamW, and gives back, when it compresses momentum.

A method with ``gradient_steps`` sends gradients first, and AdamW steps as it always does. Then its variance is frozen:
the wire takes over the denominators and the momentum, which are the same on all ranks. From there on it compresses
momentum, by default over the denominators, and AdamW applies what the group agreed on.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradwire.comm.collectives import BroadcastOp, traffic
from gradwire.engine import Engine, Lane, Plan
from gradwire.engine.state import LaneState
from gradwire.exchanges.servers import SERVER_ERROR, server_slice
from gradwire.integrations.adamw_checks import check_optimizer, spec_of
from gradwire.integrations.grad_scaler import has_scaler
from gradwire.integrations.wire import Wire
from gradwire.optim import AdamW

_DENOMINATOR = "denominator"
_UNMEASURED = (
    "and its variance is to be frozen; give the method a longer start, load the optimizer's state first, or freeze "
    "what is never used by requires_grad_(False)"
)
_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


class AdamWMoments:
    """Moves AdamW's moments into the memories of a wire when its gradient steps are over.

    Attributes:
        wire: The wire that compresses.
        optimizer: The optimizer that steps.
        leader: The one of rank 0, if all ranks are in one process.
    """

    def __init__(self, wire: Wire, optimizer: AdamW) -> None:
        self.wire, self.optimizer = wire, optimizer
        self.leader: AdamWMoments | None = None
        self._engine: Engine | None = None  # the engine at the last step
        self._unscaled = False  # whether a GradScaler unscales gradients before the wire is called
        self._apart = False  # whether ranks have stepped alone, and not synchronized since
        self._betas = _first_betas(optimizer)  # that were checked
        self._steady = math.inf  # after this step, nothing is left to do before a step
        self._denominators: tuple[list[Tensor], dict[nn.Parameter, Tensor]] = [], {}
        optimizer.frozen = self

    @torch.no_grad()
    def before_step(self) -> None:
        """Freeze the variance before the first step that needs it, and return the momentum after the last.

        Ranks of one process synchronize before the last step that they take alone: none knows when others have stepped.
        """
        inner = self.wire.engine.unwrapped
        self._check_betas()
        if inner is self._engine and inner.step > self._steady:
            return
        if inner is not self._engine:
            self._steady = _last_change(inner.plan)
            self._unscaled = self.wire.scaler is None and has_scaler(self.optimizer)
            _refuse_hosts(self.wire)
            if self._engine is not None:  # its spec was another one
                self._store_all(self._engine)
        alone = steps_alone(inner.plan)
        self._apart = inner.step < alone or (self._apart and self.leader is None)
        if self.leader is not None and inner.step == alone - 1:
            self._copy(self.leader)
        for lane, state in zip(inner.plan.lanes, inner.states, strict=True):
            needs, needed = _needs(lane, inner.step), _needs(lane, inner.step - 1)
            stale = needs and inner is not self._engine and not bool(state.tensors[_DENOMINATOR].any())
            if stale or (needs and not needed):
                self._freeze(lane, state)
            elif needed and not needs:
                self._store(lane, state)
        self._engine = inner

    def _check_betas(self) -> None:
        """Schedulers may change them, and the momentum that a wire compresses has one beta throughout."""
        betas = _first_betas(self.optimizer)
        if betas != self._betas:
            setup, plan = self.wire.setup, self.wire.engine.full_plan
            check_optimizer(self.optimizer, self.wire.parameters, setup.entry, plan, setup.written)
            self._betas = betas

    @torch.no_grad()
    def after_step(self) -> None:
        """Take over rank 0's weights and moments, where the steps that each rank took alone are over."""
        inner = self.wire.engine.unwrapped
        if not self._apart or inner.step < steps_alone(inner.plan):
            return
        self._apart = False
        if self.leader is None:
            for tensor in self._tensors():
                self._count(tensor)
                self.wire.link.broadcast_(tensor)

    def denominators(self) -> dict[nn.Parameter, Tensor]:
        """The denominators of the parameters whose gradients are momentum since the last step."""
        frozen = _frozen(self.wire.engine.unwrapped)
        tensors = [state.tensors[_DENOMINATOR] for _, state in frozen]
        known = self._denominators[0]
        if len(known) != len(tensors) or any(a is not b for a, b in zip(known, tensors, strict=True)):
            self._denominators = tensors, self._found(frozen)
        return self._denominators[1]

    def _found(self, frozen: Sequence[tuple[Lane, LaneState]]) -> dict[nn.Parameter, Tensor]:
        views = {p: view for lane, state in frozen for p, view in self._views(lane, state, _DENOMINATOR)}
        if any("step" not in self.optimizer.state[p] for p in views):
            raise RuntimeError(
                "the wire has frozen a variance, and AdamW has no moments; load the optimizer's state beside the wire's"
            )
        return views

    @torch.no_grad()
    def store_momentum(self) -> None:
        """Write the momentum that all ranks share into the optimizer's state, where it is stale since the freeze."""
        self._store_all(self.wire.engine.unwrapped)

    def _store_all(self, inner: Engine) -> None:
        for lane, state in _frozen(inner):
            self._store(lane, state)

    def _store(self, lane: Lane, state: LaneState) -> None:
        """Write the common momentum, rescaled so that AdamW takes the same step: it corrects its momentum.

        And its denominators have no floor, so that momentum would become very large where the variance is nearly zero:
        one bit has noise there, too.
        Where each rank has a momentum of its own, all begin with zeros: AdamW's is as old as its frozen variance.
        """
        is_shared = lane.feedback.memories["momentum"] == "same"
        units = dict(self._views(lane, state, _DENOMINATOR)) if not lane.feedback.divides else {}
        for p, momentum in self._views(lane, state, "momentum"):
            root = self.optimizer.denominator(p).mul_(self.optimizer.unbias(p))
            common = momentum / units.get(p, 1.0) * root if is_shared else torch.zeros_like(momentum)
            self.optimizer.state[p]["exp_avg"].copy_(common)

    def _freeze(self, lane: Lane, state: LaneState) -> None:
        if self._apart:
            raise RuntimeError(
                "ranks trained alone, and have not taken over rank 0's weights, because the optimizer has not stepped "
                "since; give the method a start that is longer than alone="
            )
        state.spare = None  # after captured steps without feedback, both generations are the same tensors
        before = state.tensors[_DENOMINATOR].clone()
        self._check_measured(lane)
        for name, place in lane.slices.items():
            p = self.wire.parameters[name]
            denominator = self.optimizer.denominator(p, lane.feedback.floor).flatten()
            momentum = self.optimizer.state[p]["exp_avg"].flatten().float() / self.optimizer.unbias(p)
            state.tensors[_DENOMINATOR][place] = denominator
            state.tensors["momentum"][place] = momentum / denominator if lane.feedback.divides else momentum
        if lane.refreshes_per_interval and lane.feedback.divides:
            self._rescale(lane, state, before)

    def _check_measured(self, lane: Lane) -> None:
        """Refuse to freeze a variance that no gradient has reached: the first one would be divided by nearly zero."""
        states = {name: self.optimizer.state[self.wire.parameters[name]] for name in lane.slices}
        for name, state in states.items():
            if "exp_avg_sq" not in state:
                raise RuntimeError(f"AdamW has not stepped {name!r} yet, {_UNMEASURED}")
        squares = {name: state["exp_avg_sq"] for name, state in states.items() if state["exp_avg_sq"].numel()}
        measured = torch.stack([x.any() for x in squares.values()]).tolist() if squares else []
        for name, is_measured in zip(squares, measured, strict=True):
            if not is_measured:
                raise RuntimeError(f"all gradients of {name!r} were zero so far, {_UNMEASURED}")

    def _rescale(self, lane: Lane, state: LaneState, before: Tensor) -> None:
        """Errors are over the denominators, as momentum is."""
        inner, n = self.wire.engine.unwrapped, lane.units.total
        ratio = torch.where(before > 0, before / state.tensors[_DENOMINATOR], 1.0)
        state.tensors["residual"].mul_(ratio)
        if SERVER_ERROR in state.tensors:
            state.tensors[SERVER_ERROR].mul_(ratio[slice(*server_slice(n, inner.world, inner.rank))])

    def _tensors(self) -> list[Tensor]:
        """Weights, and the optimizer's moments of them."""
        owned = [(p, self.optimizer.state[p]) for p in self.wire.parameters.values()]
        return [x for p, state in owned for x in (p.detach(), *(state[name] for name in _MOMENTS if name in state))]

    def _count(self, tensor: Tensor) -> None:
        inner = self.wire.engine.unwrapped
        inner.accounting.encoded[inner.plan.lanes[-1].label] += tensor.nbytes

    def _copy(self, leader: "AdamWMoments") -> None:
        """Take over another rank's weights, moments and gradients, and count what a broadcast would cost.

        It would come after the step, when also an optimizer that has not stepped yet has moments.
        """
        link, moments = self.wire.link, len(_MOMENTS) - (not self.optimizer.defaults["amsgrad"])
        for mine, theirs in zip(self._tensors(), leader._tensors(), strict=True):
            mine.copy_(theirs)
        for p in self.wire.parameters.values():
            for _ in range(1 + moments):
                self._count(p)
                link.traffic += traffic(BroadcastOp(p), link.rank, link.world)
        for p, q in zip(self.wire.parameters.values(), leader.wire.parameters.values(), strict=True):
            if p.grad is not None and q.grad is not None:
                p.grad.copy_(q.grad)

    def _views(self, lane: Lane, state: LaneState, memory: str) -> list[tuple[nn.Parameter, Tensor]]:
        """The parameters of a lane, and their parts of a memory."""
        owners = [(self.wire.parameters[name], place) for name, place in lane.slices.items()]
        return [(p, state.tensors[memory][place].view(p.shape)) for p, place in owners]


def _first_betas(optimizer: AdamW) -> list[float]:
    return [float(group["betas"][0]) for group in optimizer.param_groups]


def _last_change(plan: Plan) -> float:
    """The last step in which a lane begins to send something else than before."""
    if any(lane.refreshes_per_interval for lane in plan.lanes):
        return math.inf
    return max((max(lane.gradient_steps, lane.step_table[-1][0]) for lane in plan.lanes), default=0)


def _frozen(inner: Engine) -> list[tuple[Lane, LaneState]]:
    """The lanes whose last step sent momentum."""
    lanes = zip(inner.plan.lanes, inner.states, strict=True)
    return [(lane, state) for lane, state in lanes if _needs(lane, inner.step - 1)]


def check_same(optimizer: Optimizer, wire: Wire, plan: Plan) -> None:
    """Refuse another AdamW than the one that shares its moments with the wire, of whose plan it steps a part.

    Refuse that one, too, where a GradScaler unscales momentum that the wire has compressed.
    """
    if not any(lane.feedback.needs_denominator for lane in plan.lanes):
        return
    attached = getattr(optimizer, "frozen", None)
    if not isinstance(attached, AdamWMoments) or _held(attached.wire) != _held(wire):
        raise ValueError(
            "the wire was given another gradwire.AdamW than the one that steps, and compresses its momentum; step "
            "with the one that the wire was given"
        )
    if attached.wire is wire and wire.scaler is None and not attached._unscaled and has_scaler(optimizer):
        raise ValueError(
            "a GradScaler scales these gradients, and the wire, which compresses AdamW's momentum, does not know it; "
            "pass it scaler=scaler, or, where replicas share a process, unscale their gradients before the call"
        )


def _held(wire: Wire) -> set[int]:
    """Identities of the parameters, which are the same where workers of one process share a model."""
    return {id(p) for p in wire.parameters.values()}


def attach_optimizer(wire: Wire, optimizer: Optimizer | None) -> AdamWMoments | None:
    """Let a wire and the optimizer share moments, if the wire's plan may need them."""
    if not isinstance(optimizer, AdamW):
        return None
    _refuse_hosts(wire)
    _refuse_second_wire(wire, optimizer)
    made = AdamWMoments(wire, optimizer)
    wire.before_step = made.before_step
    return made


def _refuse_second_wire(wire: Wire, optimizer: AdamW) -> None:
    """Refuse to part an AdamW from the wire that compresses its momentum. One of the same parameters replaces it."""
    first = optimizer.frozen
    if not isinstance(first, AdamWMoments) or _held(first.wire) <= _held(wire):
        return
    lane = next((lane for lane in first.wire.engine.full_plan.lanes if lane.feedback.needs_denominator), None)
    if lane is not None:
        raise ValueError(
            f"another wire compresses this AdamW's momentum of {lane.tensors.names[0]!r}, and one AdamW serves one "
            "wire; leave optimizer= out of a wire that compresses gradients, and build a gradwire.AdamW of its own for "
            "one that compresses momentum"
        )


def steps_alone(plan: Plan) -> int:
    """For how many steps a plan that sends something later sends nothing."""
    ends = [[start for start, _, exchange in lane.step_table if not exchange.local_only] for lane in plan.lanes]
    return min(starts[0] for starts in ends if starts) if any(ends) else 0


def _refuse_hosts(wire: Wire) -> None:
    """Ranks of a host share out the lanes, so none of them has the denominators of all parameters."""
    lane = next((lane for lane in wire.engine.full_plan.lanes if lane.feedback.needs_denominator), None)
    if lane is None:
        return
    spec = spec_of(lane, wire.setup.written)
    if wire.setup.sharded:
        raise ValueError(
            f"{spec} needs the moments of whole parameters, and those of a sharded model lie on several "
            "ranks; use 'int4', or local steps (gradwire.local)"
        )
    if wire.link.host_layout is not None:
        raise ValueError(f"{spec} does not work with across='hosts'; leave across out, or use 'int4'")


def _needs(lane: Lane, step: int) -> bool:
    return step >= 0 and lane.encoder(step).feedback.needs_denominator
