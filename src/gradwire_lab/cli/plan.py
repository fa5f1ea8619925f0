"""What `gradwire plan` prints: a training that has not happened."""

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from gradwire.engine import Plan, Rule, build, default_rules
from gradwire.integrations.auto import AUTO
from gradwire.local import LocalMethod, local_method
from gradwire_lab.cli.gossip_plan import gossip_table
from gradwire_lab.cli.output import make_table
from gradwire_lab.report.numbers import in_bytes
from gradwire_lab.train.compression import arguments, method_of
from gradwire_lab.train.data import Task, load
from gradwire_lab.train.data.text import TextTask
from gradwire_lab.train.loading import batch_of, check_sizes, loader_of
from gradwire_lab.train.local_rows import parts_of
from gradwire_lab.train.models import build as build_model
from gradwire_lab.train.models.regime import regime_of
from gradwire_lab.train.optimizers import apply_regime
from gradwire_lab.train.rank_info import RankInfo
from gradwire_lab.train.recipe import Recipe
from gradwire_lab.train.schedule import Schedule, scale_of
from gradwire_lab.train.traffic_forecast import forecast, stages, total

# What is known of data sets that are not here: their facts, and how many examples or tokens there are to train on.
KNOWN: dict[str, tuple[dict[str, object], int]] = {
    "cifar10": ({"classes": 10, "channels": 3, "size": 32}, 50_000),
    "cifar100": ({"classes": 100, "channels": 3, "size": 32}, 50_000),
    "mnist": ({"classes": 10, "channels": 1, "size": 28}, 60_000),
    "fashion-mnist": ({"classes": 10, "channels": 1, "size": 28}, 60_000),
    "kmnist": ({"classes": 10, "channels": 1, "size": 28}, 60_000),
    "imagenet": ({"classes": 1000, "channels": 3}, 1_281_167),
    "ptb": ({"vocab": 10_000}, 929_589),
    "wikitext-2": ({"vocab": 33_278}, 2_088_628),
}


def parts(recipe: Recipe, world: int) -> Iterator[RenderableType]:
    """All that is printed, in order."""
    facts, steps = facts_and_steps(recipe, world)
    with torch.device("meta"):
        model = build_model(recipe.model.name, recipe.model.options, facts)
    parameters = sum(p.numel() for p in model.parameters())
    last = recipe.train.iterations or math.ceil(recipe.train.epochs * steps)
    who = f"{world} workers" if world > 1 else "1 worker"
    yield Text(f"{recipe.model.name} on {recipe.data.name}: {parameters:,} parameters, {who}")
    batch = batch_of(recipe, world) * recipe.train.accumulate
    yield f"{batch} examples a worker and step, {steps:,} steps an epoch, {last:,} steps in all"
    regime = regime_of(model)
    recipe = apply_regime(recipe, regime)
    yield Text(_optimizer(recipe, world, steps, by_model=regime is not None))
    if recipe.data.sizes:
        check_sizes(recipe, model, facts)
        grown = ", ".join(f"{side} from epoch {epoch}" for epoch, side in recipe.data.sizes)
        yield f"pixels on a side: {grown}; evaluated in full"
    if recipe.gossip.method:
        yield gossip_table(recipe, model, world)
        return
    if recipe.local.spec:
        yield from _local(recipe, model, world, last)
        return
    made = _plan(recipe, model, world, round(recipe.sync.ramp * steps))
    if recipe.sync.across != "ranks":
        yield "only hosts compress: read workers, and ranks, as hosts"
    if recipe.sync.spec == AUTO:
        yield "auto decides while it trains; these are the dense steps that it begins with"
    yield _lanes(made, last)
    yield _bytes(made, last)


def _optimizer(recipe: Recipe, world: int, steps: int, by_model: bool) -> str:
    plan, rates = recipe.optimizer, recipe.schedule
    scale = 1.0 if rates.scale == "graph" else scale_of(recipe, world, batch_of(recipe, world))
    grown = f" x {scale:g} for the batch" if scale != 1.0 else " grown with the neighbors" * (rates.scale == "graph")
    stretched = Schedule(recipe, steps=steps).length / rates.epochs if rates.epochs else 1.0
    warm = f"{rates.warmup * stretched:g} epochs of warm-up, then " if rates.warmup else ""
    at = ", ".join(f"{epoch * stretched:g}" for epoch in rates.milestones) if rates.kind == "steps" else ""
    shape = "the model's regime" if by_model else f"{warm}{rates.kind}{f' (after epochs {at})' * bool(at)}"
    momentum = f"momentum {plan.momentum:g}{' (Nesterov)' if plan.nesterov else ''}" if plan.name == "sgd" else ""
    limits = ((plan.clip, "clipped to"), (plan.local_clip, "each worker clipped to"))
    parts = [momentum, f"decay {plan.weight_decay:g}", *(f"{words} {limit:g}" for limit, words in limits if limit)]
    return ", ".join(filter(None, (f"{plan.name} with rate {plan.lr:g}{grown}; {shape}", *parts)))


def _local(recipe: Recipe, model: torch.nn.Module, world: int, last: int) -> Iterator[RenderableType]:
    """The message of a round, and how many of them there are."""
    plan = recipe.local
    rounds = local_method(plan.spec, **parts_of(recipe))
    rules = default_rules(
        rounds.message, granularity=plan.granularity, bundle=None if plan.bundle == "none" else plan.bundle
    )
    count = max(0, last - rounds.start) // rounds.H
    yield Text(f"{rounds}: {min(last, rounds.start):,} steps of the start, then {count:,} rounds, each of which sends")
    made = _build(recipe, model, rules, world)
    yield _lanes(made, count)
    yield _bytes(made, count)
    yield Text(_local_memory(rounds, sum(p.numel() for p in model.parameters() if p.requires_grad)))


def _local_memory(rounds: LocalMethod, parameters: int) -> str:
    """What a worker holds beside its model and inner optimizer, in float32."""
    vector = 4 * parameters
    outer, errors = vector * (1 + (rounds.momentum > 0)), vector * len(rounds.message.feedback.memories)
    momentum = " with momentum" if rounds.momentum else ""
    error = f", errors {in_bytes(errors)}" if errors else ""
    return (
        f"memory of a worker: outer weights{momentum} {in_bytes(outer)}, on the host with outer_device='cpu'{error}; "
        f"during a round differences {in_bytes(vector)}{', and the errors of before' if errors else ''}"
    )


def _plan(recipe: Recipe, model: torch.nn.Module, world: int, ramp: int) -> Plan:
    options: dict[str, Any] = arguments(recipe, ramp)
    rules = default_rules(method_of(recipe, ramp), granularity=options["granularity"], bundle=options["bundle"])
    return _build(recipe, model, (*options["rules"], *rules), world)


def _build(recipe: Recipe, model: torch.nn.Module, rules: Sequence[Rule], world: int) -> Plan:
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    return build(shapes, rules, world, int(recipe.sync.bucket_mb * 2**20))


def facts_and_steps(recipe: Recipe, world: int) -> tuple[dict[str, object], int]:
    """What the model must know of the data, and the steps of an epoch; without the data, from what is known of them."""
    try:
        task: Task = load(recipe.data.name, recipe.data.root or None, recipe.data.options)
    except ValueError:
        if recipe.data.name not in KNOWN or recipe.data.root:
            raise
        facts, num = KNOWN[recipe.data.name]
        if "vocab" not in facts:
            return facts, max(1, num // (world * batch_of(recipe, world) * recipe.train.accumulate))
        tokens = torch.empty(num, dtype=torch.int64, device="meta")
        task = TextTask(recipe.data.name, tokens, tokens, tokens, ("",) * int(str(facts["vocab"])))
    with torch.device("meta"):
        model = build_model(recipe.model.name, recipe.model.options, task.facts)
    place = RankInfo(world, (0,), torch.device("cpu"))
    return dict(task.facts), loader_of(recipe, task, model, place).steps


def _lanes(made: Plan, last: int) -> Table:
    settled = max(step for step in stages(made) if step <= last)
    title = f"lanes from step {settled:,} on" if settled else "lanes"
    columns = ("bucket", "rule", "tensors", "units", "parameters", "codec", "feedback", "exchange", "bytes")
    table = make_table(title, columns, ("bucket", "rule", "codec", "feedback", "exchange"))
    for number, bucket in enumerate(made.buckets):
        for lane in bucket:
            codec, exchange = lane.at(last)
            codec_text = "low rank" if exchange.compresses_in_protocol else str(codec)
            counts = (str(len(lane.tensors)), str(len(lane.units)), f"{lane.units.total:,}")
            cost = forecast(lane, made.world, last)
            bound = "<= " if cost.bounded else ""
            words = (codec_text, str(lane.feedback), str(exchange))
            table.add_row(str(number), lane.label, *counts, *words, f"{bound}{cost.payload:,.0f}")
    return table


def _bytes(made: Plan, last: int) -> Table:
    columns = ("from step", "payload", "ratio", "sent", "ratio to a float32 ring")
    table = make_table("bytes of one rank in one step", columns)
    steps = [step for step in stages(made) if step <= last]
    for row, same in groupby(steps, key=lambda step: _costs(made, step)):
        table.add_row(f"{next(same):,}", *row)
    return table


def _costs(made: Plan, step: int) -> tuple[str, ...]:
    cost = total(made, step)
    ring = 2 * (made.world - 1) / made.world * cost.dense
    bound, least = ("<= ", ">= ") if cost.bounded else ("", "")
    wire = f"{least}{ring / cost.sent:,.1f}" if cost.sent else "-"
    payload = f"{least}{cost.dense / cost.payload:,.1f}" if cost.payload else "-"
    return f"{bound}{cost.payload:,.0f}", payload, f"{bound}{cost.sent:,.0f}", wire
