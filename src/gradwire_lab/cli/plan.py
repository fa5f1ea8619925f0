"""What `gradwire plan` prints: a training that has not happened."""

import json
import math
from collections.abc import Iterator
from importlib import resources
from typing import Any

import torch
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from gradwire.codecs import codec as as_codec
from gradwire.core.segments import Segments
from gradwire.engine import build, default_rules
from gradwire.gossip import SGP, Centralized, Choco, Node, PowerGossip, auto_gamma
from gradwire.gossip.message import HEADER
from gradwire.integrations.auto import AUTO
from gradwire.integrations.optimizer_warning import why_starved
from gradwire_lab.cli.fitted_table import FittedTable
from gradwire_lab.cli.plan_local import local_parts
from gradwire_lab.cli.plan_tables import bytes_table, lanes_table
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
from gradwire_lab.train.start_check import check_start


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
    if warning := check_start(recipe, last):
        yield Text(warning)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    if recipe.local.spec:
        yield from local_parts(recipe, shapes, world, last)
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
    yield lanes_table(made, last)
    yield bytes_table(made, last)


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
