"""A wire that sends gradients goes on with AdamW's momentum, and back again, in mid-training."""

import pytest
import torch
from torch import Tensor, nn

import gradwire

WORLD, START, STEPS = 3, 6, 12
ONEBIT = f"onebit_adam(start={START}, per=32)"


class Training:
    """Replicas in lockstep, with an AdamW each."""

    def __init__(self, spec: str, **options: str) -> None:
        torch.manual_seed(0)
        self.models = [nn.Sequential(nn.Linear(24, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(WORLD)]
        self.optimizers = [gradwire.AdamW(model.parameters(), 0.01, weight_decay=0.1) for model in self.models]
        self.workers = gradwire.lockstep(self.models, spec, optimizers=self.optimizers, seed=5, **options)
        self.step = 0

    def run(self, steps: int) -> "Training":
        for _ in range(steps):
            draw = torch.Generator().manual_seed(self.step)
            for model in self.models:
                model.zero_grad()
                x, y = torch.randn(16, 24, generator=draw), torch.randn(16, 8, generator=draw)
                (model(x) - y).square().mean().backward()
            self.workers()
            for optimizer in self.optimizers:
                optimizer.step()
            self.step += 1
        return self

    def set(self, spec: str, **options: str) -> "Training":
        for wire in self.workers.wires:
            wire.set(spec, **options)
        return self

    def weights(self, rank: int = 0) -> list[Tensor]:
        return [p.detach().clone() for p in self.models[rank].parameters()]

    def debts(self) -> list[Tensor]:
        return [debt for wire in self.workers.wires for debt in wire.debts().values()]

    def frozen(self) -> Tensor:
        return self.workers.wires[0].state_dict()["denominator/0.weight"].view(16, 24)

    def measured(self) -> Tensor:
        return self.optimizers[0].denominator(self.models[0][0].weight, 0.1)


def test_gradients_and_then_momentum_are_a_start_and_what_follows() -> None:
    whole = Training(ONEBIT.replace(")", ", first=int4)")).run(STEPS)
    parts = Training("int4", feedback="none", exchange="two_way").run(START).set(ONEBIT).run(STEPS - START)
    assert all(map(torch.equal, parts.weights(), whole.weights()))


def test_a_wire_that_goes_back_and_forth_freezes_the_variance_of_the_day() -> None:
    run = Training("int4").run(START).set(ONEBIT).run(3)
    first = run.frozen()
    torch.testing.assert_close(first, run.measured())
    run.set("int4", feedback="none").run(3)
    assert not torch.allclose(first, run.measured(), rtol=1e-3)
    run.set(ONEBIT).run(1)
    torch.testing.assert_close(run.frozen(), run.measured())
    for rank in range(1, WORLD):
        assert all(map(torch.equal, run.weights(), run.weights(rank)))


@pytest.mark.filterwarnings("ignore::gradwire.OptimizerWarning")  # topk before AdamW
@pytest.mark.parametrize(
    "change", [("topk(0.1)", ONEBIT), (ONEBIT, "topk(0.1)"), ("topk(0.1)", "dgc_adam(0.1, start=2)")]
)
def test_debts_outlive_a_change(change: tuple[str, str]) -> None:
    before, after = change
    run = Training(before).run(START + 2)
    owed = run.debts()
    assert any(bool(debt.any()) for debt in owed)
    run.set(after)
    for debt, expected in zip(run.debts(), owed, strict=True):
        torch.testing.assert_close(debt, expected)
    run.run(2)
    assert all(bool(p.isfinite().all()) for p in run.weights())


def test_momentum_without_its_optimizer_is_refused() -> None:
    model = nn.Linear(8, 8)
    wire = gradwire.compress(model, "int4")
    with pytest.raises(ValueError, match=r"gradwire\.AdamW"):
        wire.set(ONEBIT)
