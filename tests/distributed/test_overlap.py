"""Under DDP, a launch leaves and arrives while backward goes on, and collectives are counted by launches."""

from itertools import chain

import torch
from torch.distributed import GradBucket

import fixtures
import gradwire
from gradwire.integrations import ddp
from spawn import run_ranks

PATIENCE = 20.0  # seconds that the last bucket waits for the first launch


def overlapped(rank: int, world: int, spec: str) -> tuple[list[int], int, int]:
    """How many launches had been heard of all ranks when the last bucket came, step by step."""
    early: list[int] = []
    original = ddp.DDPHookState.receive

    def receive(self: ddp.DDPHookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        if bucket.is_last():
            for launched in self._launched:
                launched.result(timeout=PATIENCE)
            early.append(len(self._launched))
        return original(self, bucket)

    ddp.DDPHookState.receive = receive  # type: ignore[method-assign]
    try:
        net = fixtures.ddp(fixtures.model())
        wire = gradwire.compress(net, spec, launch_mb=fixtures.LAUNCH_MB)
        optimizer = fixtures.sgd(net)
        for step in range(4):
            optimizer.zero_grad()
            fixtures.loss(net, rank, step).backward()
            optimizer.step()
        return early, len(wire.session.plan.launches), wire.report().collectives
    finally:
        ddp.DDPHookState.receive = original  # type: ignore[method-assign]


def both(rank: int, world: int) -> list[tuple[list[int], int, int]]:
    return [overlapped(rank, world, spec) for spec in ("topk(0.1)", "int8")]


def test_launches_arrive_before_the_last_bucket() -> None:
    for early, launches, collectives in chain.from_iterable(run_ranks(both, 2)):
        assert launches >= 3
        assert len(early) == 4
        assert all(1 <= count < launches for count in early[1:])  # DDP makes its buckets anew after the first step
        # Weights and biases are lanes of their own; one look at the verdict ends the step.
        assert collectives <= 4 * (2 * launches + 1)
