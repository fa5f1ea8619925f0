"""Regime and input transform: what a user's own model may set for its training.

A model with an attribute ``regime`` brings its schedule along. It is a dict from epochs to settings, where what an
epoch sets stays until a later one sets it again, or a function from the epoch to all the settings::

    self.regime = {0: {"lr": 0.1, "momentum": 0.9}, 81: {"lr": 0.01}, 122: {"lr": 0.001, "weight_decay": 0}}

Settings are ``optimizer`` (``"SGD"`` or ``"AdamW"``), ``lr``, ``momentum``, ``nesterov``, ``weight_decay`` and ``eps``;
those of the first epoch take the place of the recipe's.

``input_transform`` is a function of a batch of inputs, or a dict of two, under ``train`` and ``eval``.
"""

from collections.abc import Callable, Mapping

from torch import Tensor, nn

Settings = Mapping[str, object]
Regime = Mapping[int, Settings] | Callable[[int], Settings]
Transform = Callable[[Tensor], Tensor]


class Misfit(TypeError, ValueError):
    """A user's own code returned an object of a wrong type; the message is all that they need to know."""


def regime_of(model: nn.Module) -> Regime | None:
    """The regime that a model carries, checked."""
    regime: Regime | None = getattr(model, "regime", None)
    if regime is None or callable(regime):
        return regime
    whole = isinstance(regime, Mapping) and all(isinstance(epoch, int) for epoch in regime)
    if not whole or not all(isinstance(settings, Mapping) for settings in regime.values()):
        raise Misfit(f"a regime is a dict from epochs to dicts of settings, or a function of the epoch, not {regime!r}")
    return regime


def settings_at(regime: Regime, epoch: int) -> dict[str, object]:
    """All the settings in force in an epoch."""
    if callable(regime):
        return dict(regime(epoch))
    merged: dict[str, object] = {}
    for start in sorted(regime):
        if start <= epoch:
            merged.update(regime[start])
    return merged


def stages(regime: Regime, epochs: int) -> list[dict[str, object]]:
    """The settings of every stage that a run of so many epochs may reach, the first epoch's first."""
    starts = range(max(1, epochs)) if callable(regime) else sorted({0, *regime})
    return [settings_at(regime, start) for start in starts]


def transform_of(model: nn.Module, training: bool) -> Transform | None:
    """What a model wants done to its inputs, in training or in evaluation."""
    transform: object = getattr(model, "input_transform", None)
    if isinstance(transform, Mapping):
        transform = transform.get("train" if training else "eval")
    if transform is not None and not callable(transform):
        raise Misfit(
            f"an input_transform is a function, or a dict of functions under 'train' and 'eval', not {transform!r}"
        )
    return transform
