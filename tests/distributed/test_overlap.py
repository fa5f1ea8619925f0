"""Under DDP, a bucket of the plan is exchanged while backward goes on, and collectives are counted by buckets."""

import pytest
import torch
from torch.distributed import GradBucket

import fixtures
import gradwire
from gradwire.integrations import ddp
from spawn import Answers, cases_fixture

SPECS = {"topk(0.1)": "topk(0.1)", "int8": "int8"}
TIMEOUT = 60.0  # seconds that DDP's last bucket waits for the plan's first


def overlapped(rank: int, world: int, spec: str) -> tuple[list[int], int, int]:
    """The plan's buckets that were complete when DDP's last came, by step; all of the plan's; collectives."""
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
        wire = gradwire.compress(net, spec, bucket_mb=fixtures.BUCKET_MB)
        optimizer = fixtures.sgd(net)
        for step in range(4):
            optimizer.zero_grad()
            fixtures.loss(net, rank, step).backward()
            optimizer.step()
        return early, len(wire.engine.plan.buckets), wire.report().collectives
    finally:
        ddp.DDPHookState.receive = original


answers = cases_fixture(overlapped, 2, SPECS)


@pytest.mark.parametrize("case", SPECS)
def test_buckets_of_the_plan_arrive_before_the_last_one_of_ddp(case: str, answers: Answers) -> None:
    for early, buckets, collectives in answers[case]:
        assert buckets >= 3
        assert len(early) == 4
        assert all(1 <= count < buckets for count in early[1:])  # DDP rebuilds its own after the first step
        # Weights and biases are lanes of their own; one status message ends the step.
        assert collectives <= 4 * (2 * buckets + 1)
