"""A start that does not suit its training: what `gradwire plan` and `gradwire train` say of it."""

from gradwire.engine import method
from gradwire.integrations.trainer_warnings import start_problem
from gradwire.local import local_method
from gradwire_lab.train.compression import method_of
from gradwire_lab.train.recipe import Recipe


def check_start(recipe: Recipe, steps: int) -> str:
    """What to say of the longest start of a training of so many steps; empty where it suits."""
    if recipe.gossip.method:
        return ""
    if recipe.local.spec:
        start = local_method(recipe.local.spec, **recipe.local.message).start
        return start_problem(start, steps, "local.spec", "local.spec", measures=False)
    rules = [method(rule.spec, rule.feedback, rule.exchange) for rule in recipe.sync.rules]
    starts = [(method_of(recipe).gradient_steps, "sync.spec"), *((one.gradient_steps, "sync.rules") for one in rules)]
    start, key = max(starts, key=lambda start: start[0])
    return start_problem(start, steps, key, key, measures=True)
