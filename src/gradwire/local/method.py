"""LocalMethod: the round of local steps as a value."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from gradwire.codecs import Codec, Quantizer, codec
from gradwire.core import is_count, parse, registered
from gradwire.engine import Method, Spec, method
from gradwire.exchanges import AllGather, Exchange
from gradwire.feedback import DecoupledMomentum, Feedback

OuterFactory: TypeAlias = Callable[[Sequence[nn.Parameter]], Optimizer]
Phase: TypeAlias = "Quantizer | Codec | None"
First: TypeAlias = "Phase | Mapping[int, Phase]"  # how gradients of the start are sent; by step, where that changes


@dataclass(frozen=True)
class LocalMethod:
    """Every so many inner steps: send outer less local weights, step the outer weights by the mean, start from there.

    Attributes:
        H: Inner steps of a round.
        message: How differences are compressed and exchanged.
        rate: Of the outer SGD.
        momentum: Of the outer SGD.
        nesterov: Whether that momentum is Nesterov's.
        start: So many first steps have no rounds: gradients are averaged, or all workers take the same batches.
        first: How those gradients are encoded; with None nothing is sent, since all workers take the same batches. Or
            a table of these by step.
        alpha: The share of its own weights that a worker keeps when the outer step is applied.
        delay: The message of a round travels during so many inner steps of the next one, and is applied after them.
        fragments: Into how many parts layers are dealt, or patterns of parameter names, one a part.
        stagger: Whether parts are sent at different steps of a round, in turn.
        inner: The kind of inner optimizer that the method is meant for; any, if empty.
        keep: The share of its error that a worker's weights hold: it starts a round from the outer weights less so much
            of what it has not sent yet.
        later: Other rounds, by the inner step after which they begin. They have the message and the start of the first.
    """

    H: int
    message: Method
    rate: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False
    start: int = 0
    first: "First | tuple[tuple[int, Phase], ...]" = codec("int4")  # noqa: RUF009 - a frozen value
    alpha: float = 0.0
    delay: int = 0
    fragments: int | tuple[str, ...] = 1
    stagger: bool = True
    inner: str = ""
    keep: float = 0.0
    later: "tuple[tuple[int, LocalMethod], ...]" = ()
    name: ClassVar[str] = "local steps"
    kind: ClassVar[str] = "local"

    def __post_init__(self) -> None:
        _check(self, "H", is_count(self.H), "a whole number of inner steps from 1")
        _check(self, "rate", self.rate > 0.0, "a positive number")
        _check(self, "momentum", 0.0 <= self.momentum < 1.0, "in [0, 1)")
        _check(self, "start", self.start == 0 or is_count(self.start), "a whole number of steps from 0")
        _check(self, "alpha", 0.0 <= self.alpha < 1.0, "in [0, 1)")
        _check(self, "keep", 0.0 <= self.keep <= 1.0, "in [0, 1]")
        _check(self, "delay", is_count(self.delay, 0) and self.delay < self.H, "a whole number below H")
        object.__setattr__(self, "first", _frozen(self.first))
        steps = [step for step, _ in self.phases]
        rises = all(is_count(step, 0) for step in steps) and steps == sorted({0, *steps})
        _check(self, "first", rises, "a codec, None, or a table of them that rises from step 0")
        inside = max(steps) < max(self.start, 1)
        _check(self, "first", inside, f"a table whose steps are below start={self.start}")
        patterns = isinstance(self.fragments, tuple) and all(isinstance(x, str) for x in self.fragments)
        _check(
            self, "fragments", is_count(self.fragments) or patterns, "a whole number, or patterns as in ('a.*', '*')"
        )
        feedback, exchange = self.message.feedback, self.message.exchange
        if feedback.needs_denominator or self.message.gradient_steps:
            raise ValueError(f"{feedback} compresses an optimizer's momentum, not differences of weights; use residual")
        if isinstance(feedback, DecoupledMomentum):
            raise ValueError(f"{feedback} hands back signs, and a round needs the mean of differences; use residual")
        if "momentum" in feedback.memories and self.momentum:
            raise ValueError(f"{feedback} and the outer optimizer both have momentum; give one of them none")
        if self.keep:
            self._check_keep()
        if exchange.delays:
            raise ValueError(f"{exchange} hands back the mean of the round before; use an exchange that is not delayed")
        if self.later:
            self._check_later()

    def _check_keep(self) -> None:
        why = f"keep={self.keep} has workers start from their own errors, when a round of the whole model ends"
        if tuple(self.message.feedback.memories) != ("residual",):
            raise ValueError(f"{why}; use feedback='residual', not {self.message.feedback}")
        nothing = {"alpha": 0, "delay": 0, "fragments": 1}
        if given := [f"{name}={n}" for name, none in nothing.items() if (n := getattr(self, name)) != none]:
            raise ValueError(f"{why}; leave {' and '.join(given)} out")

    def _check_later(self) -> None:
        steps = [step for step, _ in self.later]
        rises = all(is_count(step) for step in steps) and steps == sorted({*steps})
        if not rises or steps[0] <= self.start:
            raise ValueError(f"rounds change at steps {steps}; write steps that rise, above start={self.start}")
        for rounds in (self, *(rounds for _, rounds in self.later)):
            if rounds.delay or rounds.fragments != 1:
                raise ValueError(
                    f"rounds can change only between rounds of the whole model without a delay, and these have "
                    f"delay={rounds.delay} and fragments={rounds.fragments}; leave both out"
                )
            if rounds.message != self.message:
                raise ValueError(f"all rounds send one kind of message; write {self.message} for all of them")
            if rounds is not self and (rounds.start or rounds.later):
                raise ValueError("only the first rounds have a start, and none has later rounds of its own")

    def __str__(self) -> str:
        return self.text()

    def text(self, optimizer: str = "") -> str:
        """All rounds in words, with the name of an outer optimizer that is used in place of their own."""
        momentum = f", momentum={self.momentum}" if self.momentum else ""
        outer = optimizer or f"{'Nesterov' if self.nesterov else 'SGD'}(rate={self.rate}{momentum})"
        own = "".join(f", {name}={n}" for name in ("alpha", "keep", "delay") if (n := getattr(self, name)))
        if self.fragments != 1:
            own += f", fragments={self.fragments}{'' if self.stagger else ' together'}"
        whole = f"H={self.H}, {self.message}, outer={outer}{own}{self._start_text()}"
        return "; ".join((whole, *(f"from step {step} {rounds.text(optimizer)}" for step, rounds in self.later)))

    def _start_text(self) -> str:
        how = ["on the same batches" if one is None else f"by gradients as {one}" for _, one in self.phases]
        later = "".join(f", from step {step} {text}" for (step, _), text in zip(self.phases[1:], how[1:], strict=True))
        return f", the first {self.start} steps {how[0]}{later}" if self.start else ""

    @property
    def phases(self) -> "tuple[tuple[int, Codec | None], ...]":
        """How gradients of the start are encoded, by the first step that they are; with None nothing is sent."""
        return self.first if isinstance(self.first, tuple) else ((0, self.first),)  # type: ignore[return-value]

    @property
    def gradient_table(self) -> dict[int, Codec]:
        """The codecs of the start by the number of gradients that were sent before."""
        table, sent = dict[int, Codec](), 0
        ends = [*(step for step, _ in self.phases[1:]), self.start]
        for (begin, chosen), end in zip(self.phases, ends, strict=True):
            if chosen is not None and end > begin:
                table[sent] = chosen
                sent += end - begin
        return table

    def after(self, steps: int) -> "LocalMethod":
        """The rounds that begin after so many inner steps."""
        return self.changed(sum(first <= steps for first, _ in self.later))

    def changed(self, count: int) -> "LocalMethod":
        """The rounds after so many changes of the schedule."""
        if not count:
            return self
        rounds, rest = self.later[count - 1][1], self.later[count:]
        return replace(rounds, start=self.start, first=self.first, later=rest)

    @property
    def weighs_ranks(self) -> bool:
        """Whether ranks may count by their steps. In a mean over senders, an entry of one rank would be scaled."""
        return self.message.exchange != AllGather(mean="senders")

    @property
    def outer_step(self) -> tuple[float, float, bool]:
        """What the optimizer of the outer weights is made of."""
        return self.rate, self.momentum, self.nesterov

    def rounds_within(self, steps: int, begin: int | None = None) -> tuple[int, int]:
        """How many rounds end within so many inner steps, and after which step the last of them does.

        Args:
            steps: Of the whole training.
            begin: After which step the first of these rounds begins; by default after the start.
        """
        count, end = 0, self.start if begin is None else begin
        for bound in (*(first for first, _ in self.later if first < steps), steps):
            H = self.after(end).H
            more = min(-(-max(0, bound - end) // H), max(0, steps - end) // H)  # the last one may end after the bound
            count, end = count + more, end + more * H
        return count, end

    def with_message(self, message: Method) -> "LocalMethod":
        """The same rounds with another message."""
        later = tuple((step, replace(rounds, message=message)) for step, rounds in self.later)
        return replace(self, message=message, later=later)

    def offset(self, fragment: int, count: int) -> int:
        """At which step of a round a fragment of so many is sent; 0 is the end."""
        return fragment * self.H // count if self.stagger else 0

    def outer(self, weights: Sequence[nn.Parameter]) -> Optimizer:
        """The optimizer of the outer weights."""
        return torch.optim.SGD(weights, lr=self.rate, momentum=self.momentum, nesterov=self.nesterov)


def _check(rounds: LocalMethod, name: str, valid: bool, wanted: str) -> None:
    """Refuse an argument of a round, and name it before the round, whose text is long."""
    if not valid:
        phases = ", ".join(f"{step}: {one}" for step, one in rounds.phases)
        text = f"{{{phases}}}" if name == "first" else repr(getattr(rounds, name))
        raise ValueError(f"{name}={text} must be {wanted}; the round is {rounds}")


def _frozen(first: Any) -> Any:
    """A codec, None, or pairs of steps and those, as a value that can be hashed."""
    if isinstance(first, Mapping | tuple):
        pairs = first.items() if isinstance(first, Mapping) else first
        return tuple((step, None if one is None else codec(one)) for step, one in pairs)
    return None if first is None else codec(first)


def local_method(
    spec: str | LocalMethod,
    codec: "Spec | None" = None,
    feedback: str | Feedback | None = None,
    exchange: str | Exchange | None = None,
) -> LocalMethod:
    """Make a round of a spec; a codec, feedback or exchange given with it wins over the spec's own.

    A codec that comes alone keeps the spec's feedback, if that keeps errors, and its mean over senders.
    """
    made: Any = parse(spec) if isinstance(spec, str) else spec
    if getattr(made, "kind", "") == "gossip":
        raise ValueError(
            f"{str(spec)!r} exchanges weights with neighbors; use gradwire.gossip(model, {str(spec)!r}), or for "
            f"replicas of one process gradwire.gossip_lockstep(models, {str(spec)!r})"
        )
    if not isinstance(made, LocalMethod):
        raise ValueError(
            f"{spec!r} has no number of local steps; write one of {', '.join(registered('local'))} as in "
            "'sparseloco(H=5)', and pass a codec of your own as codec="
        )
    return made.with_message(message_after(made.message, made.message if codec is None else codec, feedback, exchange))


def message_after(
    current: Method, spec: "Spec", feedback: str | Feedback | None, exchange: str | Exchange | None
) -> Method:
    """Another message. A codec alone keeps the current feedback, if that keeps errors, and the mean over senders."""
    made: Any = parse(spec) if isinstance(spec, str) else spec
    alone = method(made, feedback, exchange)
    if isinstance(made, Method):
        return alone
    if feedback is None and current.feedback.keeps_error:
        alone = replace(alone, feedback=current.feedback)
    is_sparse = all(one.selector is not None and not one.selector.receivers_redraw for _, one in alone.table)
    if exchange is None and is_sparse and not isinstance(made, Exchange) and isinstance(current.exchange, AllGather):
        alone = replace(alone, exchange=current.exchange)
    return alone
