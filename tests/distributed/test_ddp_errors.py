"""What goes wrong while gradients travel under DDP is raised by the user's own backward(), as it is."""

import gradwire
import scenes
from workers import run_ranks


class Overcast(Exception):
    """Nobody else's."""


def fail() -> None:
    raise Overcast("the sky is falling; hold it up")


def struck(rank: int, world: int) -> None:
    """An error of rank 1's in the middle of a training, under all that DDP can be told."""
    for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}, {"gradient_as_bucket_view": True}):
        net = scenes.model()
        outer = scenes.ddp(net, **options)
        wire = gradwire.compress(outer, "topk(0.1)", launch_mb=scenes.LAUNCH_MB)
        judge = wire.session.judge
        for step in range(4):
            outer.zero_grad()
            wire.session.judge = (lambda *_: fail()) if rank == 1 and step in (0, 2) else judge
            said = scenes.sentence(lambda step=step, outer=outer: scenes.loss(outer, rank, step).backward())
            expected = "Overcast: the sky is falling; hold it up" if rank == 1 and step in (0, 2) else "no refusal"
            assert said == expected, (options, step, said)


def test_an_error_keeps_its_type_and_its_sentence():
    run_ranks(struck, 2)


def early(rank: int, world: int) -> dict[str, scenes.Case]:
    """An error before anything was sent, in the first of several launches."""
    outer = scenes.ddp(scenes.model())
    wire = gradwire.compress(outer, "topk(0.1)", launch_mb=scenes.LAUNCH_MB)
    wire.session.flat = lambda *_: fail()
    return {
        "launch": (scenes.sentence(lambda: scenes.loss(outer, rank, 0).backward()), ("Overcast: the sky is falling",)),
        "twice": (scenes.sentence(lambda: gradwire.compress(outer, "sign")), ("a communication hook already", "set(")),
    }


def test_an_error_of_a_launch_is_told_too():
    scenes.check_sentences(run_ranks(early, 2))
