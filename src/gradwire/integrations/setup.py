"""Setup: from a spec and options to a plan that all ranks agree on, and to this rank's engine."""

import difflib
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral

import torch
from torch import Tensor, nn

from gradwire.comm.backend import Backend
from gradwire.core import parse
from gradwire.engine import Engine, Method, Plan, Rule, Spec, method
from gradwire.engine.hosts import AnyEngine, HostEngine
from gradwire.engine.partition import assign_owners
from gradwire.engine.plan import BUCKET_BYTES, build, default_rules, uncompressed
from gradwire.engine.precompile import precompile
from gradwire.exchanges import Exchange
from gradwire.feedback import Feedback
from gradwire.integrations.consistency import agree, errors_on_all_ranks
from gradwire.integrations.entry_point import COMPRESS, EntryPoint
from gradwire.integrations.model import local_part


def check_scaler(scaler: object) -> None:
    """Refuse a scaler that is no GradScaler."""
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise ValueError(f"scaler={scaler!r} is no torch.amp.GradScaler; pass the one of the loop, or none")


@dataclass(frozen=True)
class Options:
    """How gradients are compressed; see `compress` for each."""

    feedback: str | Feedback | None = None
    exchange: str | Exchange | None = None
    granularity: str = "layer"
    rules: Sequence[Rule] = ()
    bundle: str | None = "fp16"
    scaler: torch.amp.GradScaler | None = None
    seed: int = 0
    bucket_mb: float = BUCKET_BYTES / 2**20
    rollback: bool = True

    def __post_init__(self) -> None:
        check_scaler(self.scaler)
        if isinstance(self.rules, Rule | str) or not isinstance(self.rules, Sequence):
            raise ValueError(f"rules={self.rules!r} is no list; write rules=[gradwire.Rule('fp16', name='head.*')]")
        for rule in self.rules:
            if not isinstance(rule, Rule):
                raise TypeError(f"{rule!r} is no rule; write gradwire.Rule('fp16', name='head.*')")
        if not isinstance(self.seed, Integral) or not -(2**63) <= int(self.seed) < 2**63:
            raise ValueError(f"seed={self.seed!r} is no whole number of 64 bits, such as seed=0")
        if not isinstance(self.bucket_mb, int | float) or not 0 <= self.bucket_mb < 2**40:
            raise ValueError(f"bucket_mb={self.bucket_mb!r} is no number of megabytes, such as bucket_mb=25.0")

    @property
    def bucket_bytes(self) -> int:
        """Bytes of gradients that travel together."""
        return int(self.bucket_mb * 2**20)


def check_options(name: str, given: Iterable[str], others: Sequence[str] = (), whose: str = "compress") -> None:
    """Refuse unknown options.

    Args:
        name: What the user calls.
        given: Names of options.
        others: That it has, beside those of `Options`.
        whose: The function whose docstring has all of them.
    """
    known = [*others, *Options.__dataclass_fields__]
    if unknown := sorted(set(given) - set(known)):
        near = "".join(f"did you mean {found}=? " for found in difflib.get_close_matches(unknown[0], known, n=1))
        raise TypeError(f"{name} has no option {', '.join(unknown)}; {near}help(gradwire.{whose}) has all of them")


@dataclass
class Setup:
    """All that plans of one model depend on.

    Attributes:
        parameters: By name.
        backend: Of this rank.
        options: As given.
        hooked: Whether DDP, or hooks of sharded parameters, call the wire.
        shared: Tensors that start as rank 0's, by name.
        check_plan: Raises an error if a plan does not fit the rest of the training; it gets the specs as written, too.
        check_model: Raises an error if the model now trains other parameters.
        note: What else must be the same on all ranks.
        sharded: Whether each rank has a part of every parameter; hosts are replicas then.
        mixed: Whether ranks may have devices of different types, and so must plan the same for all of them.
        reduced_last: Names of parameters whose gradients come when backward is over.
        entry: What the user called.
        written: The specs as the user wrote them, by the label of their rule; for errors.
    """

    parameters: Mapping[str, nn.Parameter]
    backend: Backend
    options: Options
    hooked: bool = False
    shared: Mapping[str, Tensor] = field(default_factory=dict)
    check_plan: Callable[[Plan, Mapping[str, str]], None] = lambda plan, written: None
    check_model: Callable[[], None] = lambda: None
    note: str = ""
    sharded: bool = False
    mixed: bool = False
    reduced_last: Container[str] = frozenset()
    entry: EntryPoint = COMPRESS
    written: Mapping[str, str] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """Where lanes compute: with the first parameter."""
        return next(iter(self.parameters.values())).device

    @property
    def plan_world(self) -> int:
        """The number of ranks, or of hosts, between which plans compress."""
        return self.backend.size_of("across")

    @property
    def stays_on_device(self) -> bool:
        """Whether gradients and messages stay on a GPU, so that the host need not wait for any."""
        return self.device.type == "cuda" and self.backend.stream_ordered

    def agree(self, spec: Spec, options: Options, current: Feedback | None = None) -> tuple[Plan, Feedback, str]:
        """Make a plan of the spec, and make sure that all ranks made the same.

        Args:
            spec: To compress by.
            options: Which may differ from those at the start in feedback, exchange, rules and seed.
            current: The feedback until now.

        Returns:
            The plan, the main rule's feedback, and the rules as text.
        """
        with errors_on_all_ranks(self.backend):
            feedback = feedback_after(spec, options.feedback, current)
            main = method(spec, feedback, options.exchange).feedback
            rules = (*options.rules, *self._defaults(spec, feedback, options.exchange))
            text = describe(rules)
            if self.plan_world == 1 and self.backend.host_layout is not None:
                rules = uncompressed(rules)
            plan = self._build(rules)
            written = _written(spec, options)
            self.check_plan(plan, written)
            if self.stays_on_device:
                plan = plan.with_fixed_length()
        call = "" if current is None else "set() or off()"
        agree(self.backend, f"{text}; {self._circumstances(options)}", self.tensors(), call=call)
        self.written = written
        return plan, main, text

    def engine(self, plan: Plan, seed: int) -> AnyEngine:
        """This rank's side of a plan."""
        backend, options, layout = self.backend, self.options, self.backend.host_layout
        precompile(plan, self.device, first=backend.rank == 0)
        rank, shard = (backend.rank, 0) if layout is None else layout.place_of(backend.rank)
        shards = 1 if layout is None else layout.ranks_per_host
        if self.sharded or layout is None or shards == 1:
            return Engine(plan, rank, self.plan_world, seed, self.device, options.rollback, None, shard, shards)
        # Owners follow from rules, not from specs, so no memory moves between ranks when the spec changes.
        lossy = build(self._shapes, (*options.rules, *self._defaults("sign")), plan.world, options.bucket_bytes)
        return HostEngine(plan, assign_owners(lossy, shards), layout, backend.rank, seed, self.device, options.rollback)

    def text_of(self, spec: Spec) -> str:
        """The rules that a spec stands for, as text."""
        return describe((*self.options.rules, *self._defaults(spec)))

    def tensors(self) -> dict[str, str]:
        """Shape, format and trainability of all tensors, by name."""
        tensors = {**self.shared, **self.parameters}
        return {name: f"{tuple(x.shape)} {x.dtype} {x.requires_grad}" for name, x in tensors.items()}

    def broadcast(self) -> None:
        """Start as rank 0 does, or as the first replica."""
        with torch.no_grad():
            for tensor in self.shared.values():
                if (part := local_part(tensor)).numel():
                    self.backend.broadcast_(part, "across" if self.sharded else "world")
        self.shared = {}

    @property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(p.shape) for name, p in self.parameters.items()}

    def _build(self, rules: Sequence[Rule]) -> Plan:
        """The plan of some rules. Only DDP overlaps buckets, so elsewhere a GPU takes more small gradients at once.

        Large gradients stay apart: they are read where they lie, while several together take a copy.
        """
        shapes, size, parts = self._shapes, self.options.bucket_bytes, None
        if self.sharded:
            parts = {name: tuple(local_part(p).shape) for name, p in self.parameters.items()}
        plan = build(shapes, rules, self.plan_world, size, parts)
        # Slices of servers are cut out of buckets.
        shared = any(x.keeps_server_error for lane in plan.lanes for _, _, x in lane.step_table)
        fixed = shared or any(rule.granularity == "bucket" for rule in rules)
        if self.sharded and not fixed:
            return build(shapes, rules, self.plan_world, size, parts, self.reduced_last)
        fixed |= self.backend.host_layout is not None
        large = any(4 * p.numel() > size for p in self.parameters.values())
        if self.hooked or self.mixed or self.device.type != "cuda" or fixed or large:
            return plan
        return build(shapes, rules, self.plan_world, max(size, 5 * BUCKET_BYTES))

    def _defaults(
        self, spec: Spec, feedback: str | Feedback | None = None, exchange: str | Exchange | None = None
    ) -> tuple[Rule, ...]:
        return default_rules(spec, feedback, exchange, self.options.granularity, self.options.bundle)

    def _circumstances(self, options: Options) -> str:
        """What else must be the same on all ranks, or they would exchange different things."""
        scaler = "no GradScaler" if options.scaler is None else "a GradScaler"
        hook = "DDP" if self.hooked else "no DDP"
        device = "" if self.mixed else f"; device {self.device.type}"
        undo = "rollback" if options.rollback else "no rollback"
        kind = "replicas" if self.sharded else "hosts"
        hosts = "" if self.backend.host_layout is None else f"; {kind} {self.backend.host_layout}"
        buckets = f"buckets of {options.bucket_bytes} bytes"
        return f"seed {options.seed}; {buckets}; {scaler}; {hook}; {undo}{device}{hosts}{self.note}"


def _written(spec: Spec, options: Options) -> dict[str, str]:
    """What the user wrote, by the label of the rule; the feedback, where that was given beside the spec."""
    given = {"*": (spec, options.feedback)} | {rule.label: (rule.spec, rule.feedback) for rule in options.rules}
    return {
        label: f"{str(spec)!r}" if feedback is None else f"feedback={str(feedback)!r}"
        for label, (spec, feedback) in given.items()
    }


def describe(rules: Sequence[Rule]) -> str:
    """The rules as text that two ranks, or a run and its checkpoint, can compare."""
    return "; ".join(
        f"{rule.label}: {method(rule.spec, rule.feedback, rule.exchange)}, {rule.granularity}" for rule in rules
    )


def feedback_after(spec: Spec, feedback: str | Feedback | None, current: Feedback | None) -> str | Feedback | None:
    """The feedback to take: a codec alone keeps the current one, if that keeps errors."""
    made = parse(spec) if isinstance(spec, str) else spec
    if feedback is not None or isinstance(made, Method) or current is None or not current.keeps_error:
        return feedback
    return current
