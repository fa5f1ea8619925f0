"""A start that outlasts its training: what `gradwire plan` and `gradwire train` say of it."""

from gradwire.engine import method
from gradwire.integrations.trainer_warnings import FEWEST, SHARE
from gradwire.local import local_method
from gradwire_lab.train.compression import method_of
from gradwire_lab.train.recipe import Recipe


def long_start(recipe: Recipe, steps: int) -> str:
    """What to say of a training of so many steps that never leaves its start; empty where it does.

    A start by gradients before local steps may have any length; one that measures a variance may not be too short.
    """
    begin, key, fewest = _start(recipe)
    if begin < steps or not begin:
        return ""
    share = max(fewest, int(SHARE * steps))
    rule = f"{100 * SHARE:.0f} % of the training" + f", but no fewer than {fewest} steps" * (fewest > 1)
    remedy = (
        f"a start should be {rule}: train for longer, or take int4, which has no start"
        if share > max(1, steps / 2)
        else f"write a shorter one, such as start={share}, into {key}: {rule}"
    )
    told = f"the start of {key} takes {begin:,} steps, and the training has {steps:,}, so that it never leaves it"
    return f"{told}; {remedy}"


def _start(recipe: Recipe) -> tuple[int, str, int]:
    """The steps of the longest start, the key that asks for it, and the fewest that one of its kind should have."""
    if recipe.gossip.method:
        return 0, "", 1
    if recipe.local.spec:
        return local_method(recipe.local.spec, **recipe.local.message).start, "local.spec", 1
    rules = [method(rule.spec, rule.feedback, rule.exchange) for rule in recipe.sync.rules]
    starts = [(method_of(recipe).gradient_steps, "sync.spec"), *((one.gradient_steps, "sync.rules") for one in rules)]
    return *max(starts, key=lambda start: start[0]), FEWEST
