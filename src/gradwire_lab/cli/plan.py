"""What `gradwire plan` prints: a training that has not happened."""

import json
import math
from collections.abc import Iterator
from importlib import resources
from itertools import groupby
from typing import Any

import torch
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from gradwire.codecs import codec as as_codec
from gradwire.core.segments import Segments
from gradwire.engine import Plan, build, default_rules
from gradwire.gossip import SGP, Centralized, Choco, Node, PowerGossip, auto_gamma
from gradwire.gossip.message import HEADER
from gradwire.integrations.auto import AUTO
from gradwire.integrations.optimizer_warning import why_starved
from gradwire.local import LocalMethod, local_method
from gradwire_lab.cli.fitted_table import FittedTable
from gradwire_lab.cli.output import make_table
from gradwire_lab.report.numbers import in_bytes
from gradwire_lab.train.compression import arguments, method_of
from gradwire_lab.train.data import Task, TextTask, load
from gradwire_lab.train.gossip_workers import gossip_method_of, nodes
from gradwire_lab.train.loading import batch_of, check_sizes, loader_of
from gradwire_lab.train.models import build as build_model
from gradwire_lab.train.models.regime import regime_of
from gradwire_lab.train.optimizers import apply_regime
from gradwire_lab.train.rank_info import RankInfo
from gradwire_lab.train.recipe import Recipe
from gradwire_lab.train.schedule import Schedule, scale_of
from gradwire_lab.train.traffic_forecast import forecast, stages, total


def parts(recipe: Recipe, world: int) -> Iterator[RenderableType | FittedTable]:
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
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    if recipe.local.spec:
        yield from _local(recipe, shapes, world, last)
        return
    ramp = round(recipe.sync.ramp * steps)
    rules = (*arguments(recipe, ramp)["rules"], *default_rules(method_of(recipe, ramp), **recipe.sync.layout))
    if recipe.sync.across != "ranks":
        yield "only hosts compress: read workers, and ranks, as hosts"
    if recipe.sync.spec == AUTO:
        yield "auto decides while it trains; these are the dense steps that it begins with"
    made = build(shapes, rules, world, int(recipe.sync.bucket_mb * 2**20))
    if recipe.optimizer.name == "adamw" and (why := why_starved(made, "AdamW")):
        yield Text(f"{why} Use int8, int4 or onebit_adam")
    yield from _tables(made, last)


def _optimizer(recipe: Recipe, world: int, steps: int, by_model: bool) -> str:
    plan, rates = recipe.optimizer, recipe.schedule
    scale = 1.0 if rates.scale == "graph" else scale_of(recipe, world, batch_of(recipe, world))
    grown = f" x {scale:g} for the batch" if scale != 1.0 else " grown with the neighbors" * (rates.scale == "graph")
    stretched = Schedule(recipe, steps=steps).length / rates.epochs if rates.epochs else 1.0
    warm = f"{rates.warmup * stretched:g} epochs of warm-up, then " if rates.warmup else ""
    at = ", ".join(f"{epoch * stretched:g}" for epoch in rates.milestones) if rates.kind == "steps" else ""
    shape = "the model's regime" if by_model else f"{warm}{rates.kind}{f' after epochs {at}' * bool(at)}"
    momentum = f"momentum {plan.momentum:g}{' (Nesterov)' if plan.nesterov else ''}" if plan.name == "sgd" else ""
    limits = ((plan.clip, "clipped to"), (plan.local_clip, "each worker clipped to"))
    parts = [
        momentum,
        f"weight decay {plan.weight_decay:g}",
        *(f"{words} {limit:g}" for limit, words in limits if limit),
    ]
    return ", ".join(filter(None, (f"{plan.name}, learning rate {plan.lr:g}{grown} ({shape})", *parts)))


def _local(
    recipe: Recipe, shapes: dict[str, tuple[int, ...]], world: int, last: int
) -> Iterator[RenderableType | FittedTable]:
    """The message of a round, and how many of them there are."""
    rounds = local_method(recipe.local.spec, **recipe.local.message)
    rules = default_rules(rounds.message, **recipe.local.layout)
    count, end = rounds.rounds_within(last)
    yield Text(f"{rounds}: {min(last, rounds.start):,} steps of the start, then {count:,} rounds, each of which sends")
    if last > max(end, rounds.start):
        yield Text(f"the last {last - end} steps are of a round that does not end: they change no outer weights")
    yield from _tables(build(shapes, rules, world, int(recipe.sync.bucket_mb * 2**20)), count)
    yield Text(_local_memory(rounds, sum(map(math.prod, shapes.values()))))


def _local_memory(rounds: LocalMethod, parameters: int) -> str:
    """What a worker holds beside its model and inner optimizer, in float32."""
    vector, phases = 4 * parameters, (rounds, *(chosen for _, chosen in rounds.later))
    has_momentum = any(one.momentum for one in phases)
    outer, errors = vector * (1 + has_momentum), vector * len(rounds.message.feedback.memories)
    momentum = " with momentum" if has_momentum else ""
    error = f", errors {in_bytes(errors)}" if errors else ""
    error += f", what is kept of them {in_bytes(vector)}" if any(one.keep for one in phases) else ""
    return (
        f"memory of a worker: outer weights{momentum} {in_bytes(outer)}, on the host with outer_device='cpu'{error}; "
        f"during a round differences {in_bytes(vector)}{', and the errors of before' if errors else ''}"
    )


def facts_and_steps(recipe: Recipe, world: int) -> tuple[dict[str, Any], int]:
    """What the model must know of the data, and the steps of an epoch; official data need not be here for that."""
    try:
        task: Task = load(recipe.data.name, recipe.data.root or None, recipe.data.options)
    except ValueError:
        text = (resources.files("gradwire_lab.train.data") / "official.json").read_text(encoding="utf-8")
        known = json.loads(text).get(recipe.data.name)
        if known is None or recipe.data.root:
            raise
        facts, num = known["facts"], known["train"]
        if "vocab" not in facts:
            return facts, max(1, num // (world * batch_of(recipe, world) * recipe.train.accumulate))
        tokens = torch.empty(num, dtype=torch.int64, device="meta")
        task = TextTask(recipe.data.name, tokens, tokens, tokens, ("",) * facts["vocab"])
    with torch.device("meta"):
        model = build_model(recipe.model.name, recipe.model.options, task.facts)
    place = RankInfo(world, (0,), torch.device("cpu"))
    return dict(task.facts), loader_of(recipe, task, model, place).steps


def _tables(made: Plan, last: int) -> Iterator[Table | FittedTable]:
    yield _lanes(made, last)
    yield _bytes(made, last)


def _lanes(made: Plan, last: int) -> FittedTable:
    settled = max(step for step in stages(made) if step <= last)
    title = f"lanes from step {settled:,} on" if settled else "lanes"
    heads = ("rule", "bucket", "tensors", "units", "parameters", "codec", "feedback", "exchange", "bytes")
    rows = []
    for number, bucket in enumerate(made.buckets):
        for lane in bucket:
            codec, exchange = lane.at(last)
            codec_text = "low rank" if exchange.compresses_in_protocol else str(codec)
            counts = (str(len(lane.tensors)), str(len(lane.units)), f"{lane.units.total:,}")
            cost = forecast(lane, made.world, last)
            bound = "<= " if cost.bounded else ""
            words = (codec_text, str(lane.feedback), str(exchange))
            rows.append((lane.label, str(number), *counts, *words, f"{bound}{cost.payload:,.0f}"))
    spare = ("units", "tensors", "feedback", "bucket", "parameters")
    return FittedTable(title, heads, rows, spare, left=("codec", "feedback", "exchange"))


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


# -- gossip ------------------------------------------------------------------------------------------------------------


def gossip_table(recipe: Recipe, model: torch.nn.Module, world: int) -> Table:
    """The graph, the messages, and the rate."""
    table = Table(title="gossip", title_justify="left", show_header=False)
    for label, text in gossip_rows(recipe, model, world):
        table.add_row(label, text)
    return table


def gossip_rows(recipe: Recipe, model: torch.nn.Module, world: int) -> list[tuple[str, str]]:
    """What there is to say, line by line.

    Raises:
        ValueError: The graph has no such size, or the method does not take the codec.
    """
    named = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    tensors = Segments(tuple(named), tuple(named.values()))
    units = tensors if recipe.gossip.granularity == "layer" else tensors.merged()
    method, chosen = gossip_method_of(recipe), as_codec(recipe.gossip.codec or "fp32")
    hosts = nodes(world, None if recipe.gossip.across == "ranks" else recipe.gossip.across)
    workers = len(hosts[0])
    topology = method.graph.on(len(hosts))
    node = Node(method, chosen, topology, 0, recipe.train.seed, tensors, units, recipe.gossip.overlap)
    facts = [
        ("method", str(method)),
        ("graph", f"{topology}, spectral gap {topology.rho:.4g}, {_span(topology.degrees)} neighbors"),
        ("rate", f"{recipe.optimizer.lr:g} x {scale_of(recipe, world, batch_of(recipe, world), workers):.4g}"),
    ]
    if workers > 1:
        facts.append(
            ("nodes", f"of {workers} workers, which share what the node sends; read workers, and ranks, as nodes")
        )
    if isinstance(method, Centralized):
        summed = 2 * (len(hosts) - 1) / len(hosts) * chosen.size(units)
        return [*facts, ("codec", str(chosen)), ("sent", f"{summed:,.0f} bytes by each worker in a step")]
    return [*facts, *(_factors(node, method) if isinstance(method, PowerGossip) else _messages(node))]


def _factors(node: Node, method: PowerGossip) -> list[tuple[str, str]]:
    """Rows and columns take turns; of two steps in a row, the one that sends more."""
    legs = range(2 * method.iterations)
    turns = [HEADER.size + method.body_bytes(node.tensors, onto_right=leg % 2 == 0) for leg in legs]
    most = max(sum(turns[: method.iterations]), sum(turns[method.iterations :])) * node.topology.degree
    return [("sent", f"at most {most:,} bytes by the busiest worker in a step")]


def _messages(node: Node) -> list[tuple[str, str]]:
    auto = isinstance(node.method, Choco) and node.method.gamma == "auto"
    notes = 4 * (auto_gamma.METADATA_NUMBERS) if auto else 4 * isinstance(node.method, SGP)
    most = HEADER.size + notes + node.codec.size(node.units)
    bound = "" if node.codec.traits.fixed else "at most "
    whole = 4 * node.tensors.total
    facts = [
        ("codec", str(node.codec)),
        ("message", f"{bound}{most:,} bytes, {whole / most:,.1f}x smaller than float32"),
        ("sent", f"{bound}{most * node.topology.degree:,} bytes by the busiest worker in a step"),
    ]
    if auto:
        first = auto_gamma.gamma(auto_gamma.initial_state(node.codec, node.units, node.topology))
        facts.append(("gamma", f"auto, at first {first:.3g}"))
    return facts


def _span(degrees: tuple[int, ...]) -> str:
    low, high = min(degrees), max(degrees)
    return str(low) if low == high else f"{low} to {high}"
