"""Setup: from a spec and options to a plan that all ranks agree on, and to this rank's engine."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gradwire.comm.backend import Backend
from gradwire.engine.hosts import HostEngine
from gradwire.engine.method import Method, Spec, method
from gradwire.engine.partition import owners
from gradwire.engine.plan import Plan, Rule, build, default_rules, uncompressed
from gradwire.engine.step import Engine
from gradwire.engine.warmup import warm_up
from gradwire.exchanges import Exchange
from gradwire.feedback import Feedback
from gradwire.integrations.compile_notice import telling_of_compilers
from gradwire.integrations.consistency import agree, telling
from gradwire.integrations.options import Options
from gradwire.integrations.spec_change import going_on


class AgreedPlan(NamedTuple):
    """What all ranks agreed on: the plan, the main rule's method, and the rules as text."""

    plan: Plan
    main: Method
    text: str


@dataclass
class Setup:
    """All that plans of one model depend on.

    Attributes:
        parameters: By name.
        backend: Of this rank.
        options: As given.
        hooked: Whether DDP calls the wire.
        note: What else must be the same on all ranks.
        shared: Tensors that start as rank 0's, by name.
        veto: Raises where a plan does not go with the rest of the training.
    """

    parameters: Mapping[str, nn.Parameter]
    backend: Backend
    options: Options
    hooked: bool = False
    note: str = ""
    shared: Mapping[str, Tensor] = field(default_factory=dict)
    veto: Callable[[Plan], None] = lambda plan: None

    @property
    def device(self) -> torch.device:
        """Where lanes compute: with the first parameter."""
        return next(iter(self.parameters.values())).device

    @property
    def parties(self) -> int:
        """Between how many parties messages are compressed: ranks, or hosts."""
        grouping = self.backend.grouping
        return self.backend.world if grouping is None else len(grouping.hosts)

    @property
    def stays_on_device(self) -> bool:
        """Whether gradients and messages stay on a GPU, so that the host need not wait for any."""
        return self.device.type == "cuda" and self.backend.stream_ordered

    def agree(
        self,
        spec: Spec,
        feedback: str | Feedback | None,
        exchange: str | Exchange | None,
        extra: Sequence[Rule],
        current: Feedback | None = None,
        seed: int | None = None,
    ) -> AgreedPlan:
        """Make a plan of the spec, and make sure that all ranks made the same."""
        with telling(self.backend):
            for rule in extra:
                if not isinstance(rule, Rule):
                    raise TypeError(f"{rule!r} is no rule; write gradwire.Rule('fp16', name='head.*')")
            feedback = going_on(spec, feedback, current)
            main = method(spec, feedback, exchange)
            rules = (*extra, *self._defaults(spec, feedback, exchange))
            text = describe(rules)
            if self.parties == 1 and self.backend.grouping is not None:
                rules = uncompressed(rules)
            plan = build(self._shapes, rules, self.parties, self.options.launch_bytes)
            self.veto(plan)
            if self.stays_on_device:
                plan = plan.with_fixed_length()
        agree(self.backend, f"{text}; {self._circumstances(seed)}", self.tensors())
        return AgreedPlan(plan, main, text)

    def engine(self, plan: Plan, seed: int) -> Engine | HostEngine:
        """This rank's side of a plan."""
        backend, options = self.backend, self.options
        with telling_of_compilers(self.device, first=backend.rank == 0):
            warm_up(plan, self.device)
        if backend.grouping is None:
            return Engine(plan, backend.rank, backend.world, seed, self.device, options.rollback)
        # Owners follow from rules, not from specs: then nothing changes hands when the spec changes.
        lossy = (*options.rules, *self._defaults("sign"))
        owned = owners(build(self._shapes, lossy, plan.world, options.launch_bytes), backend.grouping.beside)
        return HostEngine(plan, owned, backend.grouping, backend.rank, seed, self.device, options.rollback)

    def text_of(self, spec: Spec) -> str:
        """The rules that a spec stands for, as text."""
        return describe((*self.options.rules, *self._defaults(spec)))

    def tensors(self) -> dict[str, str]:
        """Shape, format and trainability of all tensors, by name."""
        found = {**self.shared, **self.parameters}
        return {name: f"{tuple(x.shape)} {x.dtype} {x.requires_grad}" for name, x in found.items()}

    def broadcast(self) -> None:
        """Start as rank 0 does."""
        with torch.no_grad():
            for tensor in self.shared.values():
                self.backend.broadcast_(tensor)
        self.shared = {}

    @property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(p.shape) for name, p in self.parameters.items()}

    def _defaults(
        self, spec: Spec, feedback: str | Feedback | None = None, exchange: str | Exchange | None = None
    ) -> tuple[Rule, ...]:
        return default_rules(spec, feedback, exchange, self.options.granularity, self.options.bundle)

    def _circumstances(self, seed: int | None) -> str:
        """What else must be the same on all ranks, or they would exchange different things."""
        options = self.options
        scaler = "no GradScaler" if options.scaler is None else "a GradScaler"
        door = "DDP" if self.hooked else "no DDP"
        undo = "rollback" if options.rollback else "no rollback"
        hosts = "" if self.backend.grouping is None else f"; hosts {self.backend.grouping}"
        used = options.seed if seed is None else seed
        return f"seed {used}; launches of {options.launch_bytes} bytes; {scaler}; {door}; {undo}{hosts}{self.note}"


def describe(rules: Sequence[Rule]) -> str:
    """The rules as text that two ranks, or a run and its checkpoint, can compare."""
    return "; ".join(
        f"{rule.label}: {method(rule.spec, rule.feedback, rule.exchange)}, {rule.granularity}" for rule in rules
    )
