"""Preconditioning: what a wire takes from AdamW, and gives back, when it compresses momentum.

A method with ``gradient_steps`` sends gradients first, and AdamW steps as it always does. Then its variance is frozen:
the wire takes over the denominators and the momentum, which are the same on all ranks. From there on it divides
gradients by the denominators before it compresses, and AdamW applies what the group agreed on.
"""

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradwire.engine.lane import Lane
from gradwire.engine.plan import Plan
from gradwire.engine.state import LaneState
from gradwire.engine.step import Engine
from gradwire.integrations.wire import Wire
from gradwire.optim import AdamW

_DENOMINATOR = "denominator"


class Preconditioning:
    """Moves AdamW's moments into the memories of a wire when its gradient steps are over.

    Attributes:
        wire: That compresses.
        optimizer: That steps.
    """

    def __init__(self, wire: Wire, optimizer: AdamW) -> None:
        self.wire, self.optimizer = wire, optimizer
        self._engine: Engine | None = None  # that was looked at before
        optimizer.frozen = self

    @torch.no_grad()
    def before_step(self) -> None:
        """Freeze the variance where this step is the first that needs it."""
        core = self.wire.engine.core
        if core is not self._engine:
            _refuse_hosts(self.wire)
        for lane, state in zip(core.plan.lanes, core.states, strict=True):
            if not _needs(lane, core.step):
                continue
            first = core.step == lane.gradient_steps
            if first or (core is not self._engine and not bool(state.tensors[_DENOMINATOR].any())):
                self._freeze(lane, state)
        self._engine = core

    def denominators(self) -> dict[nn.Parameter, Tensor]:
        """Of the parameters whose gradients are momentum since the last step."""
        return {p: view for lane, state in self._frozen() for p, view in self._views(lane, state, _DENOMINATOR)}

    @torch.no_grad()
    def store_momentum(self) -> None:
        """Write the momentum that all ranks share into the optimizer's state, where it is stale since the freeze."""
        for lane, state in self._frozen():
            if lane.feedback.memories["momentum"] == "same":
                pairs = zip(self._views(lane, state, "momentum"), self._views(lane, state, _DENOMINATOR), strict=True)
                for (p, momentum), (_, denominator) in pairs:
                    self.optimizer.state[p]["exp_avg"].copy_(momentum * denominator)

    def _freeze(self, lane: Lane, state: LaneState) -> None:
        for name, place in lane.slices.items():
            p = self.wire.parameters[name]
            denominator = self.optimizer.denominator(p).flatten()
            state.tensors[_DENOMINATOR][place] = denominator
            state.tensors["momentum"][place] = self.optimizer.state[p]["exp_avg"].flatten().float() / denominator

    def _frozen(self) -> list[tuple[Lane, LaneState]]:
        """The lanes whose last step sent momentum."""
        core = self.wire.engine.core
        lanes = zip(core.plan.lanes, core.states, strict=True)
        return [(lane, state) for lane, state in lanes if _needs(lane, core.step - 1)]

    def _views(self, lane: Lane, state: LaneState, memory: str) -> list[tuple[nn.Parameter, Tensor]]:
        """The parameters of a lane, and their parts of a memory."""
        owners = [(self.wire.parameters[name], place) for name, place in lane.slices.items()]
        return [(p, state.tensors[memory][place].view(p.shape)) for p, place in owners]


def check_optimizer(optimizer: Optimizer | None, plan: Plan) -> None:
    """Refuse a plan that compresses momentum where no `gradwire.AdamW` with the same beta applies it."""
    lane = next((lane for lane in plan.lanes if lane.feedback.needs_denominator), None)
    if lane is None:
        return
    if not isinstance(optimizer, AdamW):
        kind = "no optimizer was given" if optimizer is None else f"{type(optimizer).__name__} was given"
        raise ValueError(
            f"{lane.feedback} compresses the momentum of gradwire.AdamW, but {kind}; build "
            "opt = gradwire.AdamW(model.parameters(), ...), and pass optimizer=opt"
        )
    beta = getattr(lane.feedback, "beta", None)
    for group in optimizer.param_groups:
        if float(group["betas"][0]) != beta:
            raise ValueError(
                f"{lane.feedback} has beta={beta}, but a group of AdamW has betas={group['betas']}; give both the same"
            )
    if any(exchange.delays for _, _, exchange in lane.table):
        raise ValueError(f"{lane.feedback} needs the momentum of the same step; use an exchange that is not delayed")


def attach_optimizer(wire: Wire, optimizer: Optimizer | None) -> None:
    """Let a wire and the optimizer share moments, if the wire's plan may need them."""
    if isinstance(optimizer, AdamW):
        _refuse_hosts(wire)
        wire.before_step = Preconditioning(wire, optimizer).before_step


def _refuse_hosts(wire: Wire) -> None:
    """Ranks of a host share out the lanes, so none of them has the denominators of all parameters."""
    lane = next((lane for lane in wire.engine.whole.lanes if lane.feedback.needs_denominator), None)
    if lane is not None and wire.link.host_layout is not None:
        raise ValueError(f"{lane.feedback} cannot be used with across='hosts'; leave across out, or use 'int4'")


def _needs(lane: Lane, step: int) -> bool:
    return step >= 0 and lane.encoder(step).feedback.needs_denominator
