"""Entry points: the functions that users call, so that errors name the remedies of that function."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from gradwire.codecs import Codec, Stage
from gradwire.core import parse
from gradwire.engine import Method, Spec
from gradwire.exchanges import Exchange
from gradwire.local.method import LocalMethod, local_method

P = ParamSpec("P")
T = TypeVar("T")
_BUILD = "build opt = gradwire.AdamW(model.parameters(), ...), and "


@dataclass(frozen=True)
class EntryPoint:
    """One way to compress gradients, and its remedies.

    Attributes:
        name: What the user calls.
        arguments: Those before the spec.
        local_steps: What to call for local steps instead; ``{spec}`` stands for the spec.
        adamw: How it gets a `gradwire.AdamW`.
    """

    name: str
    arguments: str
    local_steps: str
    adamw: str

    def refuse_local_steps(self, spec: Spec) -> None:
        """Refuse a spec of local steps, which send weights every few steps, and no gradients."""
        made = parse(spec) if isinstance(spec, str) else spec
        if isinstance(made, LocalMethod):
            raise ValueError(
                f"{str(spec)!r} takes local steps, and {self.name} compresses the gradients of every step; use "
                f"{self.local_steps.format(spec=repr(spec) if isinstance(spec, str) else 'method')}"
            )

    def rounds(self, spec: "str | LocalMethod", *parts: Any) -> LocalMethod:
        """Make a round, as `local_method` does; a way to compress gradients is refused."""
        made: Any = parse(spec) if isinstance(spec, str) else spec
        if isinstance(made, Method | Codec | Stage) or (isinstance(made, Exchange) and made.compresses_in_protocol):
            raise ValueError(
                f"{str(spec)!r} compresses the gradients of every step, and {self.local_steps.partition('(')[0]} takes "
                f"local steps; use {self.name}({self.arguments}{spec!r}) instead, or write a round such as "
                f"'sparseloco(H=5)', which may send another codec=..."
            )
        return local_method(spec, *parts)


def steps_locally(models: str, optimizers: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A function that takes optimizers before a spec: says so where the spec is in their place.

    Args:
        models: What stands for its first argument in the remedy.
        optimizers: What stands for its second one.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            second = args[1] if len(args) > 1 else None
            if isinstance(second, str | LocalMethod):
                spec = repr(second) if isinstance(second, str) else "method"
                raise TypeError(
                    f"gradwire.{function.__name__} takes {optimizers}= as its second argument, not {str(second)!r}; "
                    f"write gradwire.{function.__name__}({models}, {optimizers}, {spec})"
                )
            return function(*args, **kwargs)

        return call

    return decorate


COMPRESS = EntryPoint(
    "gradwire.compress", "model, ", "gradwire.local(model, optimizer, {spec}) instead", f"{_BUILD}pass optimizer=opt"
)
LOCKSTEP = EntryPoint(
    "gradwire.lockstep",
    "models, ",
    "gradwire.local_lockstep(models, optimizers, {spec}) instead",
    "build a gradwire.AdamW for each replica, and pass optimizers=[...]",
)
WRAPPED_OPTIMIZER = EntryPoint(
    "gradwire.DistributedOptimizer",
    "optimizer, model.named_parameters(), ",
    "gradwire.local(model, optimizer, {spec}) instead",
    f"{_BUILD}wrap it: gradwire.DistributedOptimizer(opt, model.named_parameters(), ...)",
)
ACCELERATE = EntryPoint(
    "attach",
    "accelerator, model, ",
    "attach_local(accelerator, model, {spec}) of gradwire.integrations.accelerate instead",
    f"{_BUILD}prepare it with the model: model, opt = accelerator.prepare(model, opt)",
)
TRANSFORMERS = EntryPoint(
    "TrainerCompression",
    "trainer, ",
    "TrainerLocalSteps(trainer, {spec}) of gradwire.integrations.transformers instead",
    f"{_BUILD}pass it to the Trainer: Trainer(model, ..., optimizers=(opt, None))",
)
LIGHTNING = EntryPoint(
    "LightningCompression",
    "",
    "LightningLocalSteps({spec}) of gradwire.integrations.lightning instead",
    "return gradwire.AdamW(self.parameters(), ...) from configure_optimizers of the LightningModule",
)
