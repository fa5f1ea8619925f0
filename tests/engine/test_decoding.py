"""Without feedback no rank decodes its own message: only what is received is decoded."""

import pytest
import torch

from gradwire.codecs.quantizers import FP16, QSGD
from gradwire.engine import Engine, Lockstep, Rule, build, method

WORLD = 2


def step(spec: str, feedback: str, exchange: str) -> None:
    plan = build({"weight": (40, 30)}, [Rule(method(spec, feedback, exchange))], WORLD)
    engines = [Engine(plan, rank, WORLD, 7, torch.device("cpu")) for rank in range(WORLD)]
    Lockstep(WORLD).drive([engine.run({"weight": torch.ones(40, 30)}) for engine in engines])


@pytest.mark.parametrize(
    ("spec", "exchange", "quantizer", "decoded"),
    # What is gathered is decoded once for all ranks of a process; of two shards, two messages each and the outcome.
    [("qsgd", "allgather", QSGD, 2), ("qsgd", "two_way", QSGD, 6), ("fp16", "allreduce", FP16, 0)],
)
def test_only_received_messages_are_decoded(spec, exchange, quantizer, decoded, monkeypatch):
    decode, times = quantizer.decode, []
    monkeypatch.setattr(quantizer, "decode", lambda self, *args: times.append(1) or decode(self, *args))
    step(spec, "none", exchange)
    assert len(times) == decoded
    step(spec, "residual", exchange)
    assert len(times) > 2 * decoded
