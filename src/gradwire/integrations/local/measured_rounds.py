"""Measured rounds: H as the first rounds show that it should be."""

import math
import time

import torch

from gradwire.core.payload import Payload, as_bytes, from_bytes
from gradwire.core.requests import Gather
from gradwire.engine.drive import RoundGenerator

WAITING = 0.1  # of its computing: what a step may take beside it, for its share of a round
LONGEST = 500  # steps
_ROUNDS = 2  # of which the last one counts: kernels compile in the first


class MeasuredRounds:
    """Times rounds until H is chosen.

    Attributes:
        chosen: H, once it is known.
    """

    def __init__(self) -> None:
        self.chosen: int | None = None
        self._rounds = 0
        self._ended = self._began = time.perf_counter()

    def begin(self, device: torch.device) -> None:
        """All steps of a round are taken, and its message is about to be made."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self._began = time.perf_counter()

    def agree(self, device: torch.device, steps: int) -> RoundGenerator[None]:
        """A round of so many steps is over. After the second one, all ranks choose H, by the slowest one's computing.

        Ranks that come early to a round wait for the others, so that the shortest round is what it takes.
        """
        ended, self._rounds = time.perf_counter(), self._rounds + 1
        times = [(self._began - self._ended) / steps, ended - self._began]
        if self._rounds == _ROUNDS:
            mine = torch.tensor(times, dtype=torch.float64, device=device)
            (payloads,) = yield [Gather(Payload(as_bytes(mine)))]
            pairs = [from_bytes(payload.data[:16], torch.float64).tolist() for payload in payloads]
            compute, message = max(pair[0] for pair in pairs), min(pair[1] for pair in pairs)
            self.chosen = min(LONGEST, max(1, math.ceil(message / (WAITING * max(compute, 1e-9)))))
        self._ended = time.perf_counter()
