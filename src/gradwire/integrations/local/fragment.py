"""Fragment: parameters whose differences are sent together, and what becomes of their message."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from torch import Tensor

from gradwire.engine import StepResult
from gradwire.engine.gradients import by_name
from gradwire.integrations.comm_worker import AnyFuture
from gradwire.integrations.local.outer import OuterWeights, nonfinite_names
from gradwire.integrations.setup import Setup
from gradwire.integrations.wire import Wire
from gradwire.local.method import LocalMethod


class Fragment:
    """A part of the model, or all of it.

    Attributes:
        number: Which one.
        wire: Compresses its differences, and keeps their errors.
        pending_result: What its last message leads to, until that is applied.
        age: Inner steps since that was sent.
        steps: Inner steps whose differences were sent, on average over ranks.
    """

    def __init__(self, number: int, wire: Wire) -> None:
        self.number, self.wire = number, wire
        self.pending_result: AnyFuture[StepResult] | None = None
        self.age = self.steps = 0

    @property
    def names(self) -> list[str]:
        return list(self.wire.parameters)

    def send(self, steps: int | None = None) -> None:
        """Count the steps that a message is about: so many on average over ranks, or those of this rank."""
        self.steps, self.age = self.steps + (self.age if steps is None else steps), 0

    def wait(self) -> None:
        """Wait for a message under way."""
        if self.pending_result is not None:
            self.pending_result.result()

    def apply(self, outer: OuterWeights, method: LocalMethod) -> None:
        """Step the outer weights by the message under way, and start from them; a dropped one leaves them alone.

        After a dropped one, weights of other fragments that are not finite start again, too: they would spoil this one
        in the next step.
        """
        assert self.pending_result is not None
        result, self.pending_result = self.pending_result.result(), None
        if not result.skipped:
            outer.step(result.updates)
        kept = {name: method.keep * error for name, error in self.errors().items()} if method.keep else {}
        names = {*self.names, *nonfinite_names(outer)} if result.skipped else self.names
        outer.restart(0.0 if result.skipped else method.alpha, names, kept)
        if not self.number:
            outer.restart_buffers()

    def errors(self) -> dict[str, Tensor]:
        """What this rank has not sent, by name, of parameters that have error feedback."""
        inner = self.wire.engine.unwrapped
        lanes = [(lane, state.tensors["residual"]) for lane, state in inner.lanes if "residual" in state.tensors]
        return by_name([lane for lane, _ in lanes], [residual for _, residual in lanes])

    @property
    def dense(self) -> int:
        """Float32 bytes of the inner steps whose differences were sent, as this rank would have encoded them."""
        return step_bytes([self.wire]) * self.steps


def step_bytes(wires: Sequence[Wire]) -> int:
    """Float32 bytes of what this rank encodes of a step; of ranks that share a host, their shares."""
    return 4 * sum(lane.tensors.total for wire in wires for lane in wire.engine.unwrapped.plan.lanes)


def fragments_of(setup: Setup, chosen: LocalMethod) -> list[Fragment]:
    """The fragments of a model. Their messages travel one after the other, on one account."""
    parts = split_names(setup.parameters, chosen.fragments)
    fragments: list[Fragment] = []
    for number, names in enumerate(parts):
        first = fragments[0].wire if fragments else None
        wire = Wire(setup if len(parts) == 1 else _part(setup, names), chosen.message, beside=first)
        fragments.append(Fragment(number, wire))
    return fragments


def _part(setup: Setup, names: Sequence[str]) -> Setup:
    """The setup of some parameters, with the rules that serve any of them, or none of the model's."""
    shapes = {name: tuple(p.shape) for name, p in setup.parameters.items()}
    matched = [{name for name, shape in shapes.items() if rule.matches(name, shape)} for rule in setup.options.rules]
    rules = [rule for rule, all_of in zip(setup.options.rules, matched, strict=True) if not all_of or all_of & {*names}]
    own = {name: setup.parameters[name] for name in names}
    return replace(setup, parameters=own, options=replace(setup.options, rules=rules))


def split_names(names: Iterable[str], fragments: int | tuple[str, ...]) -> list[list[str]]:
    """Deal layers to so many parts, one after the other; or give each name to the first pattern that fits it."""
    if isinstance(fragments, int):
        return _dealt(list(names), fragments)
    parts: list[list[str]] = [[] for _ in fragments]
    for name in names:
        fits = [i for i, pattern in enumerate(fragments) if fnmatchcase(name, pattern)]
        if not fits:
            raise ValueError(f"no pattern of fragments={fragments} fits {name!r}; add '*' as the last one")
        parts[fits[0]].append(name)
    idle = [pattern for pattern, part in zip(fragments, parts, strict=True) if not part]
    if idle:
        raise ValueError(f"the fragment {idle[0]!r} gets no parameter; correct it, or leave it out")
    return parts


def _dealt(names: list[str], count: int) -> list[list[str]]:
    layers = list(dict.fromkeys(_layer(name) for name in names))
    if count > len(layers):
        raise ValueError(f"fragments={count} are more than the {len(layers)} layers of the model; take fewer")
    place = {layer: i % count for i, layer in enumerate(layers)}
    return [[name for name in names if place[_layer(name)] == i] for i in range(count)]


def _layer(name: str) -> str:
    """``blocks.3`` of ``blocks.3.attention.weight``: up to a number, or else the module, if there is one."""
    words = name.split(".")
    numbers = [i for i, word in enumerate(words) if word.isdigit()]
    return ".".join(words[: numbers[0] + 1] if numbers else words[:-1] or words)
