"""Under DDP, a launch is sent and received while backward goes on, and collectives are counted by launches."""

import pytest
import torch
from torch.distributed import GradBucket

import fixtures
import gradwire
from gradwire.integrations import ddp
from spawn import Answers, cases_fixture

SPECS = {"topk(0.1)": "topk(0.1)", "int8": "int8"}
TIMEOUT = 20.0  # seconds that the last bucket waits for the first launch


def overlapped(rank: int, world: int, spec: str) -> tuple[list[int], int, int]:
    """The number of launches that were complete when the last bucket came, by step; all launches; collectives."""
    early: list[int] = []
    original = ddp.DDPHookState.receive

    def receive(self: ddp.DDPHookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        if bucket.is_last():
            results = [] if self._pass is None else self._pass.results
            for result in results:
                result.result(timeout=TIMEOUT)
            early.append(len(results))
        return original(self, bucket)

    ddp.DDPHookState.receive = receive
    try:
        net = fixtures.ddp(fixtures.model())
        wire = gradwire.compress(net, spec, launch_mb=fixtures.LAUNCH_MB)
        optimizer = fixtures.sgd(net)
        for step in range(4):
            optimizer.zero_grad()
            fixtures.loss(net, rank, step).backward()
            optimizer.step()
        return early, len(wire.engine.plan.launches), wire.report().collectives
    finally:
        ddp.DDPHookState.receive = original


answers = cases_fixture(overlapped, 2, SPECS)


@pytest.mark.parametrize("case", SPECS)
def test_launches_arrive_before_the_last_bucket(case: str, answers: Answers) -> None:
    for early, launches, collectives in answers[case]:
        assert launches >= 3
        assert len(early) == 4
        assert all(1 <= count < launches for count in early[1:])  # DDP makes its buckets anew after the first step
        # Weights and biases are lanes of their own; one status message ends the step.
        assert collectives <= 4 * (2 * launches + 1)
