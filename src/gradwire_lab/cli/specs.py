"""``gradwire codecs`` and ``gradwire show``: what there is, and what a spec stands for."""

import sys
from itertools import pairwise
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradwire.codecs import Codec
from gradwire.core.spec import parse
from gradwire.engine import Method, Plan, Rule, build, method
from gradwire.engine.method import starves_adaptive
from gradwire.local.method import LocalMethod, local_method
from gradwire_lab.cli.docstring_cards import ALONE, HEADINGS, Card, card_named, cards, size_of
from gradwire_lab.cli.options import Exchange, Feedback, Ranks, Spec
from gradwire_lab.cli.output import refusing
from gradwire_lab.cli.pages import codecs_page
from gradwire_lab.cli.round_memory import RoundMemory, memory_of
from gradwire_lab.train.traffic_forecast import forecast as traffic

ANSWERS = {  # what each part of a method decides
    "selector": "which entries are sent",
    "quantizer": "how values are written in few bits",
    "indices": "how positions of selected entries are written",
    "transform": "what is done to a vector before all else",
    "feedback": "what becomes of what was not sent",
    "exchange": "how ranks agree on one mean",
    "preset": "whole methods under one name",
    "local": "methods for gradwire.local",
}


def codecs(
    name: Annotated[str | None, typer.Argument(help="Print the card of this name alone.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the reference page, docs/codecs.md.")] = False,
) -> None:
    """List every name that may stand in a spec; with a NAME, print its card."""
    if markdown:
        typer.echo(codecs_page(), nl=False)
        return
    console = Console()
    if name is not None:
        with refusing("codecs", ValueError):
            console.print(_card_table(card_named(name)))
        return
    for kind, heading in HEADINGS.items():
        console.print(Text(f"{heading}: {ANSWERS[kind]}", style="bold"))
        console.print(_names(cards(kind), console.width))
    console.print(Text("gradwire codecs NAME prints formula, bytes, promises and paper of a name."))
    console.print(Text("gradwire show SPEC prints what a spec stands for, and what it costs."))


def show(spec: Spec, feedback: Feedback = None, exchange: Exchange = None, workers: Ranks = 4) -> None:
    """Print what a spec stands for, and what it costs."""
    console = Console()
    with refusing("show", ValueError, TypeError):
        rounds = None if spec == "auto" else parse(spec)
        if isinstance(rounds, LocalMethod):
            rounds = local_method(rounds, None, feedback, exchange)
            console.print(Text(f"{spec} = {rounds}", style="bold"))
            for step, chosen in ((0, rounds), *rounds.later):
                if rounds.later:
                    console.print(Text(f"from step {step}", style="bold"))
                console.print(_facts(chosen.message, workers, chosen, _round_memory(rounds, workers)))
            return
    whole = checked_method("show", spec, feedback, exchange)
    console.print(Text(f"{spec} = {whole}", style="bold"))
    console.print(_facts(whole, workers))


def checked_method(command: str, spec: str, feedback: str | None, exchange: str | None) -> Method:
    """The method, or a plain sentence and exit code 2."""
    with refusing(command, ValueError, TypeError):
        if spec == "auto":
            raise ValueError(
                "auto measures the link and chooses while it trains; `gradwire advise` predicts its choice"
            )
        return method(spec, feedback, exchange)


# -- codecs ------------------------------------------------------------------------------------------------------------


def _names(found: list[Card], width: int) -> Table:
    """A line for each name: what it is, and who published it."""
    taken = max(len(card.name) for card in found) + max(len(card.source) for card in found)
    table = Table.grid(padding=(0, 2, 0, 0))
    for card in found:
        table.add_row(Text(f"  {card.name}"), Text(card.brief(width - taken - 6)), Text(card.source, style="dim"))
    table.add_row("")
    return table


def _card_table(card: Card) -> Table:
    """All that is known of one name, one paragraph a row."""
    table = Table.grid(padding=(0, 2, 1, 0))
    table.add_row(Text(card.name, style="bold"), Text(card.title.replace("``", "")))
    table.add_row("kind", card.kind)
    table.add_row("specs", Text("\n".join(card.examples)))
    if card.kind == "preset" or card.name in {spec.partition("(")[0] for spec in ALONE}:
        table.add_row("stands for", Text("\n".join(f"{spec} = {method(spec)}" for spec in card.examples)))
    for label, text in (("about", card.about), ("arguments", card.arguments)):
        if text:
            table.add_row(label, Text(text.replace("``", "")))
    if card.kind == "preset":
        whole = method(card.examples[0])
        names = [name for name in (whole.feedback.name, whole.exchange.name) if name not in ("none", "auto")]
        if names:
            table.add_row("formulas", " and ".join(f"gradwire codecs {name}" for name in names))
    for label, lines in card.parts.items():
        if label != "Spec":
            table.add_row(label.lower(), Text("\n".join(lines)))
    if card.kind in ("selector", "quantizer", "indices", "transform"):
        table.add_row("bits", size_of(card))
    table.add_row(*_place(card.module))
    return table


def _place(module: str) -> tuple[str, Text]:
    """Where a name comes from; a file of ``--import`` is a module under a name that nobody has written."""
    own = module.partition(".")[0] != "gradwire"
    return ("file", Text(str(sys.modules[module].__file__))) if own else ("module", Text(module))


# -- show --------------------------------------------------------------------------------------------------------------


def _facts(whole: Method, workers: int, rounds: LocalMethod | None = None, held: str = "") -> Table:
    """What travels for one matrix of a million parameters, at each stage of the training; of local steps, in a round.

    Args:
        whole: The method.
        workers: How many ranks.
        rounds: Those of local steps, in each of which float32 would be sent.
        held: What a worker with local steps holds.
    """
    (lane,) = _planned(whole, workers).lanes
    H = rounds.H if rounds else 0
    table = Table.grid(padding=(0, 2))
    if rounds:
        table.add_row("round", _round(rounds))
    held = held or f"{4 * memory_of(lane, workers) / lane.units.total:.3g} bytes per parameter"
    table.add_row("feedback", f"{whole.feedback}; all memory together is {held}")
    if not H and (optimizer := _optimizer(whole)):
        table.add_row("optimizer", optimizer)
    for step, codec, exchange in lane.step_table:
        if len(lane.step_table) > 1:
            table.add_row("")
            table.add_row("from step", str(step))
        if not exchange.compresses_in_protocol:
            table.add_row("codec", _spelled_out(codec))
            table.add_row("promises", str(codec.traits))
        table.add_row("exchange", str(exchange))
        payload, sent, dense, varies = traffic(lane, workers, step)
        dense *= max(1, H)
        ring = 2 * (workers - 1) / workers * dense
        ranks, in_each = f"by each of {workers} ranks in a {'round' if H else 'step'}", " in each step" if H else ""
        smaller, less = f"smaller than float32{in_each}", f"less than a float32 ring all-reduce{in_each}"
        table.add_row("payload", _cost(payload, dense, varies, "for a million parameters", smaller))
        if exchange.keeps_server_error and workers > 1:
            table.add_row("", _second_leg(str(exchange), payload, dense, workers))
        table.add_row("sent", _cost(sent, ring, varies, ranks, less))
    return table


def _planned(whole: Method, workers: int) -> Plan:
    return build({"weight": (1000, 1000)}, (Rule(whole),), workers)


def _round(rounds: LocalMethod) -> str:
    """When messages are sent. Fragments of the model have one each."""
    steps = f"{rounds.H} local step{'s' * (rounds.H > 1)}"
    count = rounds.fragments if isinstance(rounds.fragments, int) else len(rounds.fragments)
    if count == 1:
        return f"{steps}, then one message:"
    if not rounds.stagger:
        return f"{steps}, then a message for each of {count} fragments; all of them:"
    gaps = [b - a for a, b in pairwise((*(rounds.offset(i, count) for i in range(count)), rounds.H))]
    apart = f"{min(gaps)}" if min(gaps) == max(gaps) else f"{min(gaps)} to {max(gaps)}"
    return f"{steps}, and {count} fragments, which are sent in turn, {apart} steps apart; all of them:"


def _round_memory(rounds: LocalMethod, workers: int) -> str:
    """What a worker with local steps holds, in bytes per parameter."""
    message = _planned(rounds.message, workers)
    memory, total = RoundMemory.of(rounds, message), sum(lane.units.total for lane in message.lanes)
    parts = memory.text(lambda size: f"{size / total:.3g}")
    return f"{4 * memory.lasting / total:.3g} bytes per parameter: {parts}"


def _optimizer(whole: Method) -> str:
    """Which optimizers a spec is for, if it is not for all."""
    if whole.feedback.needs_denominator:
        return "gradwire.AdamW"
    if getattr(whole.feedback, "momentum", 0.0) > 0:
        return "gradwire.SGD, or SGD without momentum"
    starves = starves_adaptive(whole.last, whole.feedback, whole.exchange)
    return "SGD; it starves AdamW and others that divide by a second moment: int8 or int4 with these" if starves else ""


def _cost(cost: float, dense: float, varies: bool, per: str, than: str) -> str:
    size = f"{'at most ' if varies else ''}{cost:,.0f} bytes {per}"
    return f"{size}, {'at least ' if varies else ''}{dense / cost:,.1f}x {than}" if cost else size


def _second_leg(exchange: str, payload: float, dense: float, workers: int) -> str:
    """What a rank encodes beyond its payload, where each rank is the server of a slice."""
    both = payload * (1 + 1 / workers)
    return (
        f"and 1/{workers} of it for the second leg of {exchange}, {dense / both:,.1f}x smaller with both: "
        "the payload ratio of a training"
    )


def _spelled_out(codec: Codec) -> str:
    """All slots, defaults included."""
    slots = (codec.transform, codec.selector, codec.quantizer, codec.indices)
    return " | ".join(str(stage) for stage in slots if stage is not None)
