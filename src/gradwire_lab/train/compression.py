"""Compression: the arguments of `gradwire.compress` that a recipe stands for."""

from dataclasses import replace
from typing import Any

from gradwire.codecs import Codec, codec
from gradwire.codecs.selectors import Variance
from gradwire.engine import Method, Rule, method, ramped
from gradwire.feedback import MomentumCorrection
from gradwire.integrations.auto import AUTO
from gradwire_lab.train.recipe import Recipe


def method_of(recipe: Recipe, ramp_steps: int = 0) -> Method:
    """The method of the recipe's spec.

    Where the feedback corrects momentum, that momentum is the optimizer's. A ramp starts with the densities of the
    recipe, none of them below the spec's own, with which it ends after ``ramp_steps`` steps; what selects nothing has
    no density to ramp. ``auto`` begins with dense steps.
    """
    sync = recipe.sync
    if sync.spec == AUTO:
        if sync.ramp or any(sync.parts.values()):
            raise ValueError(
                "sync.spec = 'auto' chooses by itself; leave sync.feedback, sync.exchange and sync.ramp out"
            )
        return method("fp32")
    whole = method(sync.spec, **sync.parts)
    if isinstance(whole.feedback, MomentumCorrection):
        momentum, nesterov = recipe.optimizer.momentum, recipe.optimizer.nesterov
        whole = replace(whole, feedback=replace(whole.feedback, momentum=momentum, nesterov=nesterov))
    if not sync.ramp or not ramp_steps or whole.last.selector is None:
        return whole
    return _ramped(whole, sync.densities, ramp_steps) if sync.densities else ramped(whole, ramp_steps)


def arguments(recipe: Recipe, ramp_steps: int) -> dict[str, Any]:
    """Keywords of `gradwire.compress`, and of the wires of simulated workers."""
    sync = recipe.sync
    return {
        "spec": AUTO if recipe.sync.spec == AUTO else method_of(recipe, ramp_steps),
        **sync.layout,
        "rules": tuple(Rule(**rule.model_dump()) for rule in sync.rules),
        "seed": recipe.train.seed,
        "bucket_mb": sync.bucket_mb,
        "rollback": sync.rollback,
        "across": None if sync.across == "ranks" else sync.across,
    }


def corrects_momentum(recipe: Recipe) -> bool:
    """Whether momentum is applied before compression, so that the optimizer must not apply it again."""
    return isinstance(method_of(recipe).feedback, MomentumCorrection)


def needs_adamw(recipe: Recipe) -> str:
    """The first spec that, as ``onebit_adam`` does, compresses the momentum of `gradwire.AdamW`; empty without one."""
    rules = [(rule.spec, method(rule.spec, rule.feedback, rule.exchange)) for rule in recipe.sync.rules]
    methods = [(recipe.sync.spec, method_of(recipe)), *rules]
    return next((spec for spec, made in methods if made.feedback.needs_denominator), "")


def uses_variance(recipe: Recipe) -> bool:
    """Whether the selector wants to know how much gradients vary within a batch."""
    return isinstance(method_of(recipe).last.selector, Variance)


def _ramped(whole: Method, densities: list[float], steps: int) -> Method:
    table: dict[int, Codec] = {steps * i // len(densities): _dense(whole.last, d) for i, d in enumerate(densities)}
    table[steps] = whole.last
    return replace(whole, table=tuple(sorted(table.items(), key=lambda entry: entry[0])))


def _dense(chain: Codec, density: float) -> Codec:
    """The same codec at another density, not below its own; at 1, plain float32."""
    if density == 1.0:
        return codec("fp32")
    selector: Any = chain.selector
    if not hasattr(selector, "ratio"):
        raise ValueError(f"sync.ramp needs a selector with a ratio, such as topk(0.001), and {chain} has none")
    return replace(chain, selector=replace(selector, ratio=max(density, selector.ratio)))
