"""Recipe checks: what only other parts of the package can judge."""

from gradwire.local import LocalMethod
from gradwire_lab.train.data import TASKS, TEXTS, maker_of
from gradwire_lab.train.recipe import Recipe


def check(recipe: Recipe) -> None:
    """What only other parts of the package can judge."""
    from gradwire.engine import method
    from gradwire_lab.train import models
    from gradwire_lab.train.compression import corrects_momentum, method_of, needs_adamw

    models.load(recipe.model.name)
    maker_of(recipe.data.name)
    _refuse_unlike(recipe)
    _refuse_gossip(recipe.sync.spec)
    method_of(recipe, ramp_steps=100)
    for rule in recipe.sync.rules:
        method(rule.spec, rule.feedback, rule.exchange)
    if recipe.sync.bundle != "none":
        method(recipe.sync.bundle)
    if recipe.local.spec:
        _check_local(recipe)
    if recipe.gossip.method:
        _check_gossip(recipe)
    elif recipe.gossip.elastic:
        raise ValueError(
            "gossip.elastic needs a method of gossip; name one that can be elastic, as in gossip.method = 'choco'"
        )
    if recipe.own_models and recipe.train.precision == "fp16":
        raise ValueError(
            "workers with models of their own would each scale the loss by another factor; use train.precision = 'bf16'"
        )
    sends_gradients = not (recipe.gossip.method or recipe.local.spec)
    if sends_gradients or corrects_momentum(recipe):
        _refuse_second_momentum(recipe)
    if sends_gradients and recipe.optimizer.name != "adamw" and (spec := needs_adamw(recipe)):
        raise ValueError(
            f"{spec!r} compresses the momentum of AdamW, and the recipe steps by {recipe.optimizer.name}; "
            "write --set optimizer.name=adamw, with a rate that suits it, as in --set optimizer.lr=1e-3"
        )


def _refuse_second_momentum(recipe: Recipe) -> None:
    """Refuse an optimizer with momentum behind a feedback that applies it before compression."""
    from gradwire_lab.train.compression import corrects_momentum, method_of

    if getattr(method_of(recipe).feedback, "momentum", 0.0) <= 0:
        return
    spec, own = recipe.sync.spec, recipe.optimizer
    if own.name == "adamw":
        raise ValueError(
            f"AdamW has momentum of its own, and {spec!r} applies momentum before compression; write --spec int4, or "
            "--set optimizer.name=sgd, with a rate that suits it"
        )
    if own.momentum and not corrects_momentum(recipe):
        raise ValueError(
            f"SGD has momentum of its own, and {spec!r} applies momentum before compression; write "
            "--set optimizer.momentum=0"
        )


def _refuse_unlike(recipe: Recipe) -> None:
    """Refuse a model of ours that does not take the data; of a user's own model it is not known what it takes."""
    from gradwire_lab.train.models import LANGUAGE, MODELS

    model, data = recipe.model.name, recipe.data.name
    if model not in MODELS or data not in TASKS or (model in LANGUAGE) == (data in TEXTS):
        return
    takes, given, other_model, other_data = (
        ("text", "images", "cnn", "pydoc") if model in LANGUAGE else ("images", "text", "lstm", "digits")
    )
    raise ValueError(
        f"the model {model} takes {takes}, and the data {data} are {given}; name another model, as in --set "
        f"model.name={other_model}, or other data, as in --set data.name={other_data}"
    )


def _refuse_gossip(spec: str) -> None:
    from gradwire.core.registry import registered

    name = spec.partition("(")[0].strip()
    if name in registered("local"):
        raise ValueError(
            f"{spec!r} takes local steps, and does not compress gradients; write --set 'local.spec={spec}' instead"
        )
    if name in registered("gossip"):
        raise ValueError(
            f"{spec!r} is a method of gossip, not a spec; write --set gossip.method={name} instead, and its graph as "
            "gossip.graph"
        )


def _check_gossip(recipe: Recipe) -> None:
    from gradwire.codecs import codec
    from gradwire_lab.train.gossip_workers import gossip_method_of

    method = gossip_method_of(recipe)
    if recipe.gossip.codec:
        codec(recipe.gossip.codec)
    if recipe.gossip.elastic and recipe.gossip.across != "ranks":
        raise ValueError("gossip.elastic has nodes of one worker, which may come and go; leave gossip.across out")
    if recipe.schedule.scale == "linear" and method.name != "centralized":
        raise ValueError("a step of gossip averages a worker and its neighbors alone; use schedule.scale = 'graph'")


def _check_local(recipe: Recipe) -> None:
    from gradwire.local import local_method

    method = local_method(recipe.local.spec, **recipe.local.message)
    if recipe.gossip.method:
        raise ValueError("workers gossip, or agree on weights by [local]; for both, write gossip.H, the local steps")
    if method.start and any(chosen is None for _, chosen in method.phases):
        raise ValueError("the workers of a recipe take batches of their own; write a codec as first= of local.spec")
    _refuse_inner(recipe.local.spec, method)


def _refuse_inner(spec: str, method: LocalMethod) -> None:
    """Refuse rounds that are meant for an optimizer that recipes do not have."""
    inner = next((one.inner for one in (method, *(later for _, later in method.later)) if one.inner), "")
    if inner:
        raise ValueError(
            f"local.spec = {spec!r} is meant for inner steps of {inner}, and recipes step by sgd or adamw; write "
            f"diloco instead, as in --set 'local.spec=diloco(H={method.H}, momentum={method.momentum})', or a loop of "
            "your own around gradwire.local (docs/local.md#two-optimizers)"
        )
