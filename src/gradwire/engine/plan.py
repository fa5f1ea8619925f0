"""Plan: which rule, therefore which lane, serves each parameter.

The first matching rule wins. Parameters are taken in the reverse of their registration, which is about the order in
which backward delivers them, and cut into *buckets*: sets of lanes that travel together.
"""

import difflib
import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import groupby

from gradwire.codecs import Codec, codec
from gradwire.core import Segments
from gradwire.engine.lane import Lane
from gradwire.engine.method import Method, Spec, method
from gradwire.exchanges import Auto, Delayed, Exchange, Noop, choose
from gradwire.feedback import Feedback, NoFeedback

GRANULARITIES = ("layer", "bucket", "model")
BUCKET_BYTES = 25 * 2**20
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Rule:
    """Parameters that match are compressed in this way.

    Attributes:
        spec: A codec, a preset, or a table of codecs by step.
        name: A glob over parameter names.
        min_dim: Fewest dimensions.
        max_dim: Most dimensions.
        min_size: Fewest elements.
        max_size: Most elements.
        feedback: Wins over the spec's own.
        exchange: Wins over the spec's own.
        granularity: What the codec sees as one vector: each ``layer``, a ``bucket`` of layers, or the ``model``.
    """

    spec: Spec
    name: str = "*"
    min_dim: int = 0
    max_dim: int | None = None
    min_size: int = 0
    max_size: int | None = None
    feedback: str | Feedback | None = None
    exchange: str | Exchange | None = None
    granularity: str = "layer"

    def __post_init__(self) -> None:
        if self.granularity not in GRANULARITIES:
            raise ValueError(f"granularity {self.granularity!r} is unknown; choose {', '.join(GRANULARITIES)}")

    def matches(self, name: str, shape: tuple[int, ...]) -> bool:
        size = math.prod(shape)
        return (
            fnmatchcase(name, self.name)
            and self.min_dim <= len(shape) <= (len(shape) if self.max_dim is None else self.max_dim)
            and self.min_size <= size <= (size if self.max_size is None else self.max_size)
        )

    @property
    def label(self) -> str:
        """The condition, for tables."""
        parts = [self.name] if self.name != "*" else []
        least = {"dim": self.min_dim or None, "size": self.min_size or None}
        for what, most in (("dim", self.max_dim), ("size", self.max_size)):
            parts += [f"{what}{sign}{n}" for sign, n in ((">=", least[what]), ("<=", most)) if n is not None]
        return " ".join(parts) or "*"


@dataclass(frozen=True)
class Plan:
    """Buckets of lanes, for one model and one world."""

    buckets: tuple[tuple[Lane, ...], ...]
    world: int

    @cached_property
    def lanes(self) -> tuple[Lane, ...]:
        return tuple(lane for bucket in self.buckets for lane in bucket)

    @cached_property
    def bucket_names(self) -> tuple[tuple[str, ...], ...]:
        """The parameters of each bucket."""
        return tuple(tuple(name for lane in bucket for name in lane.tensors.names) for bucket in self.buckets)

    @cached_property
    def bucket_of(self) -> dict[str, int]:
        """The number of each parameter's bucket."""
        return {name: i for i, names in enumerate(self.bucket_names) for name in names}

    @property
    def start(self) -> int:
        """How many first steps send gradients without feedback."""
        return max((lane.gradient_steps for lane in self.lanes), default=0)

    def part(self, names: Container[str]) -> "Plan":
        """The lanes that hold any of these parameters."""
        buckets = [
            tuple(x for x in bucket if any(name in names for name in x.tensors.names)) for bucket in self.buckets
        ]
        return Plan(tuple(filter(None, buckets)), self.world)

    def with_fixed_length(self) -> "Plan":
        """The same plan with messages of known length wherever possible; the updates are the same."""

        def fixed(lane: Lane) -> Lane:
            table = [(start, chosen.with_fixed_length(), exchange) for start, chosen, exchange in lane.step_table]
            return replace(lane, step_table=tuple(table))

        return Plan(tuple(tuple(map(fixed, bucket)) for bucket in self.buckets), self.world)


def default_rules(
    spec: Spec,
    feedback: str | Feedback | None = None,
    exchange: str | Exchange | None = None,
    granularity: str = "layer",
    bundle: str | None = "fp16",
) -> tuple[Rule, ...]:
    """The spec for everything, but 1-D tensors (biases, norms) dense in one bundle, under the same feedback."""
    chosen = method(spec, feedback, exchange)
    main = Rule(chosen, granularity=granularity)
    lossless = chosen.last.traits.lossless and not chosen.exchange.compresses_in_protocol
    if bundle is None or (lossless and not chosen.feedback.needs_denominator):
        return (main,)
    # Gradients where the rest is momentum: the optimizer steps 1-D tensors as it always does.
    feedback_of_bundle = NoFeedback() if chosen.feedback.needs_denominator else chosen.feedback
    dense = Rule(
        Method(method(bundle).table, feedback_of_bundle, _of_bundle(chosen.exchange), alone=chosen.alone),
        max_dim=1,
        granularity="model",
    )
    return (dense, main)


def _of_bundle(exchange: Exchange) -> Exchange:
    """The exchange of the bundle: it must be delayed, or send nothing, where the rest of the step does."""
    if isinstance(exchange, Delayed):
        return Delayed()
    return exchange if isinstance(exchange, Noop) else Auto()


def build(
    shapes: Shapes,
    rules: Sequence[Rule],
    world: int,
    bucket_bytes: int = BUCKET_BYTES,
    local_shapes: Shapes | None = None,
    reduced_last: Container[str] = (),
) -> Plan:
    """Assign every parameter to the first rule that matches it, and lay out lanes and buckets.

    Args:
        shapes: By name.
        rules: In order.
        world: Number of ranks.
        bucket_bytes: Bytes of gradients that travel together.
        local_shapes: Those of what this rank holds, where that is less. Empty parts are left out.
        reduced_last: Names of parameters whose gradients come when backward is over, wherever they are registered.
    """
    methods = [method(rule.spec, rule.feedback, rule.exchange) for rule in rules]
    for rule in rules:
        _refuse_idle(rule, shapes)
    chosen = {name: _first(rules, name, shape) for name, shape in shapes.items()}
    modelwide = {i for i, rule in enumerate(rules) if rule.granularity == "model"}
    if local_shapes is not None:
        shapes = {name: shape for name, shape in local_shapes.items() if math.prod(shape)}
    groups = _bucket_groups(shapes, chosen, modelwide, bucket_bytes, reduced_last)
    buckets = []
    for group in groups:
        by_rule = sorted(group, key=lambda name: chosen[name])  # stable: keeps backward's order
        lanes = [
            _lane(rules[i], methods[i], {name: shapes[name] for name in names}, world)
            for i, names in groupby(by_rule, key=lambda name: chosen[name])
        ]
        buckets.append(tuple(lanes))
    return Plan(tuple(buckets), world)


def _refuse_idle(rule: Rule, shapes: Shapes) -> None:
    """Refuse a rule by name that serves no parameter; one by size or dimension may serve none in some models."""
    if rule.name == "*" or any(rule.matches(name, shape) for name, shape in shapes.items()):
        return
    named = [name for name in shapes if fnmatchcase(name, rule.name)]
    if named:
        parameters = ", ".join(f"{name} {shapes[name]}" for name in named[:3])
        raise ValueError(f"the rule [{rule.label}] fits none of the parameters with that name: {parameters}; loosen it")
    near = ", ".join(difflib.get_close_matches(rule.name.replace("*", ""), list(shapes), n=3, cutoff=0.0))
    raise ValueError(f"the rule [{rule.label}] names no trainable parameter; the nearest names are {near}")


def _first(rules: Sequence[Rule], name: str, shape: tuple[int, ...]) -> int:
    for i, rule in enumerate(rules):
        if rule.matches(name, shape):
            return i
    raise ValueError(f"no rule matches the parameter {name!r}; end the rules with one for '*'")


def _bucket_groups(
    shapes: Shapes, chosen: Mapping[str, int], modelwide: set[int], bucket_bytes: int, reduced_last: Container[str]
) -> list[list[str]]:
    """Names by bucket. What is reduced last, or compressed as one with the rest of the model, can only travel last."""
    names = list(reversed(list(shapes)))
    apart = [name for name in names if chosen[name] not in modelwide]
    groups = _cut([name for name in apart if name not in reduced_last], shapes, bucket_bytes)
    # Nothing else is computed while those travel, so fewer buckets are better: a small one is sent with a large one.
    groups += _cut([name for name in apart if name in reduced_last], shapes, bucket_bytes, overfull=True)
    groups = groups or [[]]
    groups[-1] += [name for name in names if chosen[name] in modelwide]
    return groups


def _cut(names: Sequence[str], shapes: Shapes, limit: int, overfull: bool = False) -> list[list[str]]:
    """Names by bucket of so many bytes; ``overfull``: a bucket may be larger by its last parameter."""
    groups: list[list[str]] = []
    filled = 0
    for name in names:
        size = 4 * math.prod(shapes[name])
        if not groups or (filled >= limit if overfull else filled + size > limit):
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    return groups


def _lane(rule: Rule, method_: Method, shapes: Shapes, world: int) -> Lane:
    tensors = Segments(tuple(shapes), tuple(shapes.values()))
    units = tensors if rule.granularity == "layer" else tensors.merged()
    table = tuple((start, x, _resolve(exchange, x, units, world)) for start, x, exchange in method_.lane_table)
    return Lane(rule.label, tensors, units, method_.feedback, table, method_.gradient_steps, method_.refresh)


def _resolve(exchange: Exchange, codec: Codec, units: Segments, world: int) -> Exchange:
    if isinstance(exchange, Delayed):
        return replace(exchange, inner=_resolve(exchange.inner, codec, units, world))
    return choose(codec, units, world) if isinstance(exchange, Auto) else exchange


def uncompressed(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """The same rules where there is no other host: float32, under the same feedback.

    Nothing is lost, so no error is kept; what is kept already is sent at once.
    """
    dense = []
    for rule in rules:
        lossy = method(rule.spec, rule.feedback, rule.exchange)
        exchange = Delayed() if lossy.exchange.delays else Auto()
        spec = Method(((0, codec("fp32")),), lossy.feedback, exchange)
        dense.append(replace(rule, spec=spec, feedback=None, exchange=None))
    return tuple(dense)
