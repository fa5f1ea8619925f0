"""Round length: how many inner steps a round has, where that follows from the time that steps and messages take.

It is H as the first rounds show that it should be; or each rank takes so many steps that all of them end a round at
about the same time.
"""

import logging
import math
import time
from typing import TYPE_CHECKING

import torch

from gradwire.comm.backend import Backend
from gradwire.core import Gather, Payload, as_bytes, from_bytes
from gradwire.engine import RoundGenerator
from gradwire.local.method import LocalMethod

if TYPE_CHECKING:
    from gradwire.integrations.local.handle import LocalSync

WAITING = 0.1  # of its computing: what a step may take beside it, for its share of a round
LONGEST = 30  # steps: the longest round whose loss was measured in a training of 1,500 steps (docs/local.md)
_log = logging.getLogger("gradwire")
_ROUNDS = 2  # of which the last one counts: kernels compile in the first


class TimedRounds:
    """The time that the steps of a round take, without that of its message, which waits for the slowest rank.

    Attributes:
        computing: Seconds of all steps of the round that ends.
    """

    def __init__(self) -> None:
        self.computing = 0.0
        self.restart()

    def restart(self) -> None:
        """A round begins."""
        self._began = time.perf_counter()

    def end_computing(self, device: torch.device) -> None:
        """All steps of the round are taken, and its message is about to be made."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.computing = self.seconds

    @property
    def seconds(self) -> float:
        """Since the round began."""
        return time.perf_counter() - self._began


class UnevenSteps(TimedRounds):
    """The steps of each rank in a round, by the speed that was measured in the round before.

    Attributes:
        steps: Of each rank, by rank.
    """

    def __init__(self, H: int, rank: int, world: int) -> None:
        super().__init__()
        self._H, self._rank = H, rank
        self.steps = [H] * world

    @property
    def own(self) -> int:
        """The steps of this rank."""
        return self.steps[self._rank]

    @property
    def mean(self) -> int:
        """Over all ranks."""
        return round(sum(self.steps) / len(self.steps))

    @property
    def weight(self) -> float:
        """Of this rank's difference in the mean: its share of all steps, times the number of ranks."""
        return self.own * len(self.steps) / sum(self.steps)

    def seconds_per_step(self) -> float:
        """Of this rank, in the round that ends."""
        return self.computing / self.own

    def agree(self, device: torch.device) -> RoundGenerator[None]:
        """Compare speeds with all ranks, and choose the steps of the next round."""
        seconds = yield from _gather([self.seconds_per_step()], device)
        speeds = [1.0 / max(one, 1e-9) for (one,) in seconds]
        each = self._H * len(speeds) / sum(speeds)
        self.steps = [max(1, round(each * speed)) for speed in speeds]
        self.restart()


class MeasuredRounds(TimedRounds):
    """Times rounds until H is chosen.

    Attributes:
        chosen: H, once it is known.
    """

    def __init__(self) -> None:
        super().__init__()
        self.chosen: int | None = None
        self._rounds = 0

    def agree(self, device: torch.device, steps: int) -> RoundGenerator[None]:
        """A round of so many steps is over. After the second one, all ranks choose H, by the slowest one's computing.

        Ranks that come early to a round wait for the others, so that the shortest round is what it takes.
        """
        self._rounds += 1
        times = [self.computing / steps, self.seconds - self.computing]
        if self._rounds == _ROUNDS:
            computes, messages = zip(*(yield from _gather(times, device)), strict=True)
            compute, message = max(computes), min(messages)
            fits = max(1, math.ceil(message / (WAITING * max(compute, 1e-9))))
            self.chosen = min(LONGEST, fits)
            _log.info(
                "auto=True takes H=%d; a step takes %.1f times its computing from H=%d on",
                self.chosen,
                1 + WAITING,
                fits,
            )
        self.restart()


def _gather(numbers: list[float], device: torch.device) -> RoundGenerator[list[list[float]]]:
    """The numbers of all ranks."""
    mine = torch.tensor(numbers, dtype=torch.float64, device=device)
    (payloads,) = yield [Gather(Payload(as_bytes(mine)), scope="world")]
    return [from_bytes(payload.data[: mine.nbytes], torch.float64).tolist() for payload in payloads]


def check_rounds(chosen: LocalMethod, link: Backend, uneven: bool, measured: bool, is_given: bool) -> None:
    """Refuse rounds that do not go with hosts, with steps by speed, with a measured H, or with ``outer``."""
    if is_given and any(one.outer_step != chosen.outer_step for _, one in chosen.later):
        raise ValueError(
            "outer= makes an optimizer with a rate and momentum of its own, and these rounds change theirs; leave "
            "outer out, or write one rate and momentum, and let a scheduler of torch change the rate of outer.optimizer"
        )
    if chosen.keep and link.host_layout is not None:
        raise ValueError(f"keep={chosen.keep} needs errors of each rank's own; write keep=0, or leave across out")
    option = "uneven=True" if uneven else "auto=True"
    if (uneven or measured) and (chosen.delay or chosen.fragments != 1 or chosen.later):
        given = "is a local_schedule" if chosen.later else f"has delay={chosen.delay} and fragments={chosen.fragments}"
        raise ValueError(
            f"{option} ends a round at once and for the whole model, and chooses its steps; this one {given}; write "
            f"delay=0, fragments=1 and no local_schedule, or leave {option} out"
        )
    if uneven and measured:
        raise ValueError("auto=True measures one H, and uneven=True gives each rank its own; leave one of them out")


def take_rounds(handle: "LocalSync", chosen: LocalMethod) -> None:
    """Take the rounds that a schedule has now. A rate that stays the same is left to the optimizer's scheduler."""
    if chosen.outer_step != handle.method.outer_step:
        handle.outer.configure(chosen)
    handle.method = chosen
