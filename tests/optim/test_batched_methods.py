"""Methods that compress AdamW's momentum take the same steps for all ranks at once as rank by rank, bit for bit."""

import pytest
import torch
from torch import Tensor, nn

import gradwire
from gradwire.engine.batched import Batched

WORLD, STEPS = 3, 14
CASES = {
    "one bit": "onebit_adam(start=4, per=32)",
    "one bit, exact first, divided after": "onebit_adam(start=4, per=32, first=fp32, divide='after')",
    "refreshed": "zero_one_adam(start=3, per=32, refresh=2)",
    "sparse": "dgc_adam(0.1, start=4, masking=True)",
    "sparse, values": "dgc_adam(0.1, start=4, values=fp32, decay=0.9)",
    "all entries": "dgc_adam(1.0, start=4, values=fp32)",
}


class Training:
    def __init__(self, spec: str) -> None:
        torch.manual_seed(0)
        self.models = [nn.Sequential(nn.Linear(24, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(WORLD)]
        self.optimizers = [gradwire.AdamW(model.parameters(), 0.01, weight_decay=0.1) for model in self.models]
        self.workers = gradwire.lockstep(self.models, spec, optimizers=self.optimizers, seed=5)

    def step(self, step: int) -> None:
        draw = torch.Generator().manual_seed(step)
        for model in self.models:
            model.zero_grad()
            x, y = torch.randn(16, 24, generator=draw), torch.randn(16, 8, generator=draw)
            (model(x) - y).square().mean().backward()
        if step == 9:
            next(self.models[1].parameters()).grad[0, 0] = torch.nan  # dropped by all
        self.workers()
        for optimizer in self.optimizers:
            optimizer.step()

    def state(self) -> list[Tensor]:
        wires = [x for wire in self.workers.wires for x in wire.state_dict().values()]
        states = [each for own in self.optimizers for each in own.state_dict()["state"].values()]
        moments = [x for each in states for _, x in sorted(each.items())]
        return [*wires, *moments, *(p for model in self.models for p in model.parameters())]


@pytest.mark.parametrize("spec", CASES.values(), ids=CASES)
def test_batched_steps_equal_those_rank_by_rank(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def declined(*_: object) -> bool:
        return False

    batched, by_rank = Training(spec), Training(spec)
    can_run, took = Batched.can_run, []

    def counted(self: Batched, grads: object) -> bool:
        took.append(can_run(self, grads))  # type: ignore[arg-type]
        return took[-1]

    for step in range(STEPS):
        monkeypatch.setattr(Batched, "can_run", counted)
        batched.step(step)
        monkeypatch.setattr(Batched, "can_run", declined)
        by_rank.step(step)
        assert all(map(torch.equal, batched.state(), by_rank.state()))
    assert took == [True] * STEPS
    for mine, other in zip(batched.workers.wires, by_rank.workers.wires, strict=True):
        assert mine.engine.accounting.encoded == other.engine.accounting.encoded
        assert vars(mine.link.traffic) == pytest.approx(vars(other.link.traffic), rel=1e-12)
        assert mine.skipped == other.skipped == 1
