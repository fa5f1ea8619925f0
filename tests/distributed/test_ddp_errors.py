"""What goes wrong while gradients travel under DDP is raised by the user's own backward(), as it is."""

import fixtures
import gradwire
from spawn import run_ranks


class Overcast(Exception):
    """Nobody else's."""


def fail() -> None:
    raise Overcast("the sky is falling; hold it up")


def struck(rank: int, world: int) -> None:
    """An error of rank 1's in the middle of a training, under all that DDP can be told."""
    for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}, {"gradient_as_bucket_view": True}):
        net = fixtures.model()
        outer = fixtures.ddp(net, **options)
        wire = gradwire.compress(outer, "topk(0.1)", launch_mb=fixtures.LAUNCH_MB)
        judge = wire.session.judge
        for step in range(4):
            outer.zero_grad()
            wire.session.judge = (lambda *_: fail()) if rank == 1 and step in (0, 2) else judge
            said = fixtures.sentence(lambda step=step, outer=outer: fixtures.loss(outer, rank, step).backward())
            expected = "Overcast: the sky is falling; hold it up" if rank == 1 and step in (0, 2) else "no refusal"
            assert said == expected, (options, step, said)


def test_an_error_keeps_its_type_and_its_sentence():
    run_ranks(struck, 2)


def early(rank: int, world: int) -> dict[str, fixtures.Case]:
    """An error before anything was sent, in the first of several launches."""
    outer = fixtures.ddp(fixtures.model())
    wire = gradwire.compress(outer, "topk(0.1)", launch_mb=fixtures.LAUNCH_MB)
    wire.session.flat = lambda *_: fail()
    return {
        "launch": (
            fixtures.sentence(lambda: fixtures.loss(outer, rank, 0).backward()),
            ("Overcast: the sky is falling",),
        ),
        "twice": (
            fixtures.sentence(lambda: gradwire.compress(outer, "sign")),
            ("a communication hook already", "set("),
        ),
    }


def test_an_error_of_a_launch_is_told_too():
    fixtures.check_sentences(run_ranks(early, 2))
