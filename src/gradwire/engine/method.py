"""Method: a whole way to compress, by step: codecs, feedback, exchange. What a spec in `compress` stands for."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeAlias

from gradwire.codecs import Codec, Stage, codec
from gradwire.core import Segments, parse
from gradwire.core.renamed import renamed_attributes
from gradwire.exchanges import Auto, Exchange, Noop
from gradwire.feedback import Feedback, NoFeedback, Residual

Spec: TypeAlias = "str | Stage | Codec | Exchange | Method | Mapping[int, str | Stage | Codec]"
_ONE_BIT = 1.5  # bits a value, with scales
_MANY = 1 << 16  # values
_ARGUMENTS = {
    "feedback": "as feedback=",
    "exchange": "as exchange=",
    "gossip": "to gradwire.gossip",
    "local": "to gradwire.local",
}


@renamed_attributes({"stages": "lane_table"})
@dataclass(frozen=True)
class Method:
    """From step N on, this codec; throughout, this exchange.

    Attributes:
        table: Codecs by step.
        feedback: Of all steps after the first `gradient_steps`.
        exchange: Of all steps.
        gradient_steps: For so many steps gradients are sent without feedback.
        alone: For so many steps nothing is sent; then all ranks continue from rank 0's weights and moments.
        refresh: Later steps that send gradients, too: so many, before the interval between them doubles; 0: none.
    """

    table: tuple[tuple[int, Codec], ...]
    feedback: Feedback
    exchange: Exchange
    gradient_steps: int = 0
    alone: int = 0
    refresh: int = 0
    kind: ClassVar[str] = "preset"

    def __post_init__(self) -> None:
        steps = [step for step, _ in self.table]
        if not steps or steps[0] != 0 or steps != sorted(set(steps)):
            raise ValueError(f"a step table must rise from step 0, but this one has steps {steps}")
        if self.gradient_steps and self.gradient_steps not in steps:
            raise ValueError(f"gradients are sent for {self.gradient_steps} steps, but the step table has {steps}")
        if self.refresh < 0 or (self.refresh and not self.gradient_steps):
            raise ValueError(f"refresh={self.refresh} must be 0 or more, and needs a start of 1 step or more")
        for _, chosen in self.table:
            if self.exchange.check is not None:
                self.exchange.check(chosen)
            most = getattr(chosen.selector, "most", 1.0)
            if most < 1.0 and not self.feedback.keeps_error:
                raise ValueError(
                    f"{chosen} may leave out entries that pass its test, and feedback 'none' would lose them; "
                    "use feedback='residual', or most=1.0"
                )

    def __str__(self) -> str:
        entries = [f"{step}: {chosen}" for step, chosen in self.table]
        codecs = "{" + ", ".join(entries) + "}" if len(entries) > 1 else str(self.table[0][1])
        codecs = "" if self.exchange.compresses_in_protocol else f"{codecs}, "
        first = f", the first {self.gradient_steps} steps without feedback" if self.gradient_steps else ""
        alone = f", the first {self.alone} without traffic" if self.alone else ""
        again = f", and later ones at intervals that double after {self.refresh}" if self.refresh else ""
        return f"{codecs}feedback={self.feedback}, exchange={self.exchange}{first}{alone}{again}"

    @property
    def lane_table(self) -> list[tuple[int, Codec, Exchange]]:
        """Codec and exchange from a step on. What is not sent is not rounded either."""
        first = [(0, codec("fp32"), Noop())] if self.alone else []
        now = [chosen for step, chosen in self.table if step <= self.alone][-1]
        later = [(step, chosen, self.exchange) for step, chosen in self.table if step > self.alone]
        return [*first, (self.alone, now, self.exchange), *later]

    @property
    def last(self) -> Codec:
        """The codec that training settles on."""
        return self.table[-1][1]


def method(spec: Spec, feedback: "str | Feedback | None" = None, exchange: "str | Exchange | None" = None) -> Method:
    """Make a method of a spec; feedback and exchange given with it win over the spec's own."""
    made: Any = parse(spec) if isinstance(spec, str) else spec
    if isinstance(made, Method):
        base = made
    elif isinstance(made, Exchange) and made.compresses_in_protocol:
        base = Method(((0, codec("fp32")),), Residual(), made)
    elif isinstance(made, Mapping):
        base = _from_table(made)
    elif isinstance(made, Stage | Codec):
        base = _from_table({0: made})
    else:
        kind = getattr(made, "kind", type(made).__name__)
        where = f", and pass {spec!r} {_ARGUMENTS[kind]}" if kind in _ARGUMENTS else ""
        raise ValueError(
            f"{spec!r} is of kind {kind}, not a way to compress; give a codec, for example topk(0.01) | sign{where}"
        )
    chosen = {"feedback": _part(feedback, Feedback), "exchange": _part(exchange, Exchange)}
    return replace(base, **{name: part for name, part in chosen.items() if part is not None})


def _from_table(table: Mapping[int, Any]) -> Method:
    made = tuple((_step_number(step), codec(spec)) for step, spec in table.items())
    return Method(made, _default_feedback(made[-1][1]) if made else NoFeedback(), Auto())


def _step_number(key: object) -> int:
    # The keys of tables that were read from a file may be texts.
    if isinstance(key, int) or (isinstance(key, str) and key.isdecimal()):
        return int(key)
    raise ValueError(
        f"{key!r} in a step table is no step; write whole numbers, for example {{0: 'topk(0.25)', 500: 'topk(0.01)'}}"
    )


def _default_feedback(chosen: Codec) -> Feedback:
    """Error feedback where entries are left out or rounded one way; none for casts and unbiased codecs."""
    if chosen.selector is not None:
        return NoFeedback() if chosen.selector.traits.unbiased else Residual()
    traits = chosen.traits
    biased = traits.contraction and not (traits.linear or traits.unbiased)
    return Residual() if biased else NoFeedback()


def _part(given: Any, kind: type) -> Any:
    made = parse(given) if isinstance(given, str) else given
    if made is not None and not isinstance(made, kind):
        raise ValueError(f"{given!r} is no {kind.__name__.lower()}; see `gradwire codecs` for all names")
    return made


def starves_adaptive(codec: Codec, feedback: Feedback, exchange: Exchange) -> bool:
    """Whether few entries, single bits or a low rank are sent, and the rest is kept for later steps.

    An optimizer that divides by a second moment then takes what waited for many steps for one step's gradient.
    """
    if not feedback.keeps_error or feedback.needs_denominator or "residual" not in feedback.memories:
        return False
    bits = 8 * codec.size(Segments.single(_MANY)) / _MANY
    return exchange.compresses_in_protocol or codec.selector is not None or bits < _ONE_BIT
