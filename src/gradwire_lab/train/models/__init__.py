"""Models: everything that a recipe can name, and a user's own.

An image model turns [batch, channels, height, width] into logits [batch, classes]; a language model turns tokens
[batch, time] into logits [batch, time, vocab]. A recurrent one, known by its method ``start``, also takes and returns a
state: ``logits, state = model(tokens, state)``, beginning with ``model.start(batch)``.
"""

from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import entry_points

import torch
from torch import nn

from gradwire_lab.train.call_with_options import call_with_options, load_function, nearest
from gradwire_lab.train.models.digits import cnn
from gradwire_lab.train.models.gpt import GPT, gpt2
from gradwire_lab.train.models.lstm import LanguageLSTM
from gradwire_lab.train.models.regime import Misfit
from gradwire_lab.train.models.resnet import resnet, resnet18, resnet50
from gradwire_lab.train.models.resnet9 import alexnet, resnet9
from gradwire_lab.train.models.vgg import vgg16, vgg16_cifar

Maker = Callable[..., nn.Module]

MODELS: dict[str, Maker] = {
    **{f"resnet{depth}": partial(resnet, depth) for depth in (20, 32, 44, 56, 110)},
    "resnet9": resnet9,
    "alexnet": alexnet,
    "vgg16-cifar": vgg16_cifar,
    "vgg16": vgg16,
    "resnet18": resnet18,
    "resnet50": resnet50,
    "cnn": cnn,
    "lstm": LanguageLSTM,
    "gpt": GPT,
    "gpt2": gpt2,
}
LANGUAGE = ("lstm", "gpt", "gpt2")  # those that read text
GROUP = "gradwire.models"  # the entry points by which installed packages add models


def load(text: str) -> Maker:
    """The maker behind a name of `MODELS` or of an entry point, ``file.py:make``, or ``package.module:make``."""
    if ":" not in text:
        if text.endswith(".py"):
            raise ValueError(f"the model {text} is a file; name the function in it too, as in {text}:make")
        if text in MODELS:
            return MODELS[text]
        points = {point.name: point for point in entry_points(group=GROUP)}
        if text not in points:
            known = {**MODELS, **points}
            raise ValueError(f"there is no model called {text!r}; {nearest(text, known)} (your own: file.py:make)")
        return points[text].load()  # type: ignore[no-any-return]
    return load_function(text)


def build(
    text: str,
    options: Mapping[str, object] | None = None,
    facts: Mapping[str, object] | None = None,
    seed: int | None = None,
) -> nn.Module:
    """Load and call a maker: with the options of a recipe, and those facts of the data that it has keywords for.

    With a seed, the weights are the same for the same seed, and the global generator is left as it was.
    """
    maker, known = load(text), dict(facts or {})
    if "classes" in known:
        known["num_classes"] = known["classes"]  # the keyword of torchvision, and of many others
    with torch.random.fork_rng(devices=[], enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        model = _call(maker, text, options or {}, known)
    if not isinstance(model, nn.Module):
        raise Misfit(f"{text} returned {model!r}, which is not a torch.nn.Module")
    return model


def _call(maker: Maker, text: str, options: Mapping[str, object], facts: Mapping[str, object]) -> nn.Module:
    """What a maker of ours cannot do is due to its options; what a user's own cannot may be an error to be traced."""
    try:
        return call_with_options(maker, "model", text, options, facts)
    except (TypeError, RuntimeError, ArithmeticError) as error:
        if text not in MODELS or not options:
            raise
        given = ", ".join(f"model.options.{word} = {value!r}" for word, value in options.items())
        why = " ".join(str(error).split())
        raise ValueError(f"the model {text} does not take {given}: {why}") from None
