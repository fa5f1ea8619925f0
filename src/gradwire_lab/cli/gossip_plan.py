"""What `gradwire plan` prints of a training in which workers gossip."""

from rich.table import Table
from torch import nn

from gradwire.codecs import codec as as_codec
from gradwire.core.segments import Segments
from gradwire.gossip import SGP, Centralized, Choco, Node, PowerGossip, auto_gamma
from gradwire.gossip.message import HEADER
from gradwire_lab.train.gossip_workers import method_of, nodes
from gradwire_lab.train.loading import batch_of
from gradwire_lab.train.recipe import Recipe
from gradwire_lab.train.schedule import scale_of


def gossip_table(recipe: Recipe, model: nn.Module, world: int) -> Table:
    """The graph, the messages, and the rate."""
    table = Table(title="gossip", title_justify="left", show_header=False)
    for label, text in rows(recipe, model, world):
        table.add_row(label, text)
    return table


def rows(recipe: Recipe, model: nn.Module, world: int) -> list[tuple[str, str]]:
    """What there is to say, line by line.

    Raises:
        ValueError: The graph has no such size, or the method does not take the codec.
    """
    named = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    tensors = Segments(tuple(named), tuple(named.values()))
    units = tensors if recipe.gossip.granularity == "layer" else tensors.merged()
    method, chosen = method_of(recipe), as_codec(recipe.gossip.codec or "fp32")
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
