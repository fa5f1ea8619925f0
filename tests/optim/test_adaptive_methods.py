"""Methods that compress AdamW's momentum equal their recursions, written plainly; they resume, and refuse the rest."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradwire
from gradwire.engine.lane import is_refresh
from gradwire.feedback import PreconditionedMomentum

WORLD, START, STEPS, RATE, DECAY, BETA = 3, 4, 10, 0.01, 0.1, 0.9
REFRESHED = (6, 10, 14, 22)  # with refresh=2: 0, 1, 2, 4, 6, 10, 14, 22; of those, after the start


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(24, 16), nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def loss(model: nn.Module, rank: int, step: int) -> Tensor:
    draw = torch.Generator().manual_seed(100 * step + rank)
    x, y = torch.randn(16, 24, generator=draw), torch.randn(16, 8, generator=draw)
    width = next(model.parameters()).dtype
    return (model(x.to(width)) - y.to(width)).square().mean()


class Training:
    """Replicas in lockstep, with an AdamW each."""

    def __init__(self, spec: str, world: int = WORLD, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        self.models = [Net().to(dtype) for _ in range(world)]
        self.optimizers = [gradwire.AdamW(model.parameters(), RATE, weight_decay=DECAY) for model in self.models]
        self.workers = gradwire.lockstep(self.models, spec, optimizers=self.optimizers, **options)
        self.step = 0

    def run(self, steps: int) -> "Training":
        for _ in range(steps):
            for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
                optimizer.zero_grad()
                loss(model, rank, self.step).backward()
            self.workers()
            for optimizer in self.optimizers:
                optimizer.step()
            self.step += 1
        return self

    def weights(self, rank: int = 0) -> list[Tensor]:
        return [p.detach().clone() for p in self.models[rank].parameters()]


def floored(variance: Tensor, steps: int, floor: float) -> Tensor:
    root = (variance / (1 - 0.999**steps)).sqrt() + 1e-8
    return torch.maximum(root, floor * root.mean())


def sign(x: Tensor, per: int) -> Tensor:
    flat = x.flatten()
    parts = [torch.where(part >= 0, 1.0, -1.0) * part.abs().mean() for part in flat.split(per)]
    return torch.cat(parts).view_as(x)


def mean_gradients(model: nn.Module, step: int) -> list[list[Tensor]]:
    """By parameter, then by rank."""
    found = []
    for rank in range(WORLD):
        model.zero_grad()
        loss(model, rank, step).backward()
        found.append([p.grad.clone() for p in model.parameters()])
    return [list(each) for each in zip(*found, strict=True)]


def plain(method: str, steps: int, floor: float = 0.1, per: int = 32) -> list[Tensor]:
    """The recursion of one method, with exact gradients in its start, on one model."""
    model = Net()
    names = [name for name, _ in model.named_parameters()]
    m = [torch.zeros_like(p) for p in model.parameters()]
    v = [torch.zeros_like(p) for p in model.parameters()]
    errors = [[torch.zeros_like(p) for p in model.parameters()] for _ in range(WORLD)]
    moments: dict[int, list[Tensor]] = {}
    frozen: dict[int, Tensor] = {}
    last: dict[int, Tensor] = {}
    variances: dict[int, Tensor] = {}
    measured = [0] * len(m)  # steps that have measured the variance
    for step in range(steps):
        grads = mean_gradients(model, step)
        for i, p in enumerate(model.parameters()):
            matrix = p.dim() == 2 and "weight" in names[i]
            if not matrix or step < START or (method == "zero_one" and step in REFRESHED):
                t = measured[i]
                if i in frozen:  # back to units of gradients; the variance and its count are those of before
                    m[i] = m[i] * (variances[i].sqrt() + 1e-8)  # AdamW has no floor, and must take the same step
                    m[i] *= 1 - BETA**t  # which AdamW divides by
                    del frozen[i]
                measured[i] = t = t + 1
                g = sum(grads[i]) / WORLD
                m[i] = BETA * m[i] + (1 - BETA) * g
                v[i] = 0.999 * v[i] + 0.001 * g * g
                move = m[i] / (1 - BETA**t) / ((v[i] / (1 - 0.999**t)).sqrt() + 1e-8)
            else:
                if i not in frozen:
                    variances[i] = v[i] / (1 - 0.999 ** measured[i])
                    frozen[i] = floored(v[i], measured[i], floor)
                    for rank in range(WORLD):
                        errors[rank][i] *= last.get(i, 0.0) / frozen[i]
                    last[i] = frozen[i]
                    m[i] = m[i] / (1 - BETA ** measured[i])  # it began with zeros; from here on nothing is corrected
                    m[i] = m[i] if method == "paper" else m[i] / frozen[i]
                    moments[i] = [m[i].clone() for _ in range(WORLD)]
                d = frozen[i]
                if method != "dense":
                    sent = []
                    for rank in range(WORLD):
                        x = grads[i][rank] if method == "paper" else grads[i][rank] / d
                        target = BETA * m[i] + (1 - BETA) * x + errors[rank][i]
                        sent.append(sign(target, per))
                        errors[rank][i] = target - sent[-1]
                    m[i] = sum(sent) / WORLD
                else:  # everything is sent
                    for rank in range(WORLD):
                        moments[i][rank] = BETA * moments[i][rank] + (1 - BETA) * grads[i][rank] / d
                    m[i] = sum(moments[i]) / WORLD
                move = m[i] / d if method == "paper" else m[i]
            with torch.no_grad():
                p.mul_(1 - RATE * DECAY).sub_(RATE * move)
    return [p.detach().clone() for p in model.parameters()]


def close(found: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize(
    ("spec", "options", "method", "floor"),
    [
        (f"onebit_adam(start={START}, per=32, first=fp32)", {"exchange": "allgather"}, "onebit", 0.1),
        (
            f"onebit_adam(start={START}, per=32, first=fp32, floor=0.3, divide='after')",
            {"exchange": "allgather"},
            "paper",
            0.3,
        ),
        (
            f"zero_one_adam(start={START}, per=32, first=fp32, refresh=2)",
            {"exchange": "allgather"},
            "zero_one",
            0.1,
        ),
        (f"dgc_adam(1.0, start={START}, values=fp32, first=fp32)", {}, "dense", 0.1),
    ],
)
def test_methods_equal_their_recursions(spec: str, options: dict[str, Any], method: str, floor: float) -> None:
    found = Training(spec, bundle="fp32", **options).run(STEPS)
    close(found.weights(), plain(method, STEPS, floor))


def gradient(weight: Tensor, rank: int, step: int) -> Tensor:
    draw = torch.Generator().manual_seed(100 * step + rank)
    x, y = torch.randn(16, 24, generator=draw), torch.randn(16, 16, generator=draw)
    (grad,) = torch.autograd.grad((x @ weight.T - y).square().mean(), weight)
    return grad


def two_legs(weight: Tensor, steps: int, *, divide_first: bool) -> Tensor:
    """1-bit Adam, its Algorithm 1: workers and servers, each with an error. A server has a third of the matrix."""
    m, v, d = (torch.zeros_like(weight) for _ in range(3))
    errors, served = [torch.zeros_like(weight) for _ in range(WORLD)], torch.zeros_like(weight)
    for step in range(steps):
        grads = [gradient(weight, rank, step) for rank in range(WORLD)]
        if step < START:
            g = sum(grads) / WORLD
            m, v = BETA * m + (1 - BETA) * g, 0.999 * v + 0.001 * g * g
            move = m / (1 - BETA ** (step + 1)) / ((v / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8)
        else:
            if step == START:
                d, m = floored(v, START, 0.1), m / (1 - BETA**START)
                m = m / d if divide_first else m
            sent = []
            for rank in range(WORLD):
                target = BETA * m + (1 - BETA) * (grads[rank] / d if divide_first else grads[rank]) + errors[rank]
                sent.append(sign(target, 32))
                errors[rank] = target - sent[-1]
            target = sum(sent) / WORLD + served
            m = sign(target, 32)
            served = target - m
            move = m if divide_first else m / d
        with torch.no_grad():
            weight.mul_(1 - RATE * DECAY).sub_(RATE * move)
    return weight.detach()


@pytest.mark.parametrize("divide", ["before", "after"])
def test_onebit_adam_keeps_the_errors_of_workers_and_servers(divide: str) -> None:
    models = [nn.Linear(24, 16, bias=False) for _ in range(WORLD)]
    optimizers = [gradwire.AdamW(model.parameters(), RATE, weight_decay=DECAY) for model in models]
    spec = f"onebit_adam(start={START}, per=32, first=fp32, divide={divide!r})"
    workers = gradwire.lockstep(models, spec, optimizers=optimizers)
    expected = two_legs(models[0].weight.detach().clone().requires_grad_(), STEPS, divide_first=divide == "before")
    for step in range(STEPS):
        for rank, model in enumerate(models):
            model.weight.grad = gradient(model.weight, rank, step)
        workers()
        for optimizer in optimizers:
            optimizer.step()
    for model in models:
        close([model.weight.detach()], [expected])
    assert any("served" in name for name in workers.wires[0].state_dict())


SPECS = [
    f"onebit_adam(start={START}, per=32)",
    f"onebit_adam(start={START}, per=32, divide='after')",
    f"dgc_adam(0.1, start={START})",
    f"zero_one_adam(start={START}, per=32, refresh=2)",
    f"onebit_adam(start={START}, per=32, alone=3)",
]


@pytest.mark.parametrize("spec", SPECS)
def test_replicas_stay_equal(spec: str) -> None:
    found = Training(spec).run(STEPS)
    for rank in range(1, WORLD):
        assert all(map(torch.equal, found.weights(), found.weights(rank)))


@pytest.mark.parametrize("at", [START - 2, START, START + 1, START + 3])  # in the start, at its end, around a refresh
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", SPECS)
def test_a_run_goes_on_bit_for_bit(spec: str, dtype: torch.dtype, at: int) -> None:
    whole = Training(spec, dtype=dtype).run(STEPS)
    first, second = Training(spec, dtype=dtype).run(at), Training(spec, dtype=dtype)
    for old, new, before, after in zip(first.models, second.models, first.optimizers, second.optimizers, strict=True):
        new.load_state_dict(old.state_dict())
        after.load_state_dict(copy.deepcopy(before.state_dict()))
    for old, new in zip(first.workers.wires, second.workers.wires, strict=True):
        new.load_state_dict(old.state_dict())
    second.step = at
    assert all(map(torch.equal, second.run(STEPS - at).weights(), whole.weights()))


def test_a_run_of_torchs_adamw_is_taken_over() -> None:
    model = Net()
    before = torch.optim.AdamW(model.parameters(), RATE, weight_decay=DECAY)
    for step in range(START):
        before.zero_grad()
        loss(model, 0, step).backward()
        before.step()
    after = gradwire.AdamW(model.parameters(), RATE, weight_decay=DECAY)
    after.load_state_dict(before.state_dict())
    wire = gradwire.compress(model, "onebit_adam(start=0, per=32)", optimizer=after)
    frozen = after.denominator(model.first.weight)
    for step in range(START, STEPS):
        after.zero_grad()
        loss(model, 0, step).backward()
        wire()
        after.step()
    torch.testing.assert_close(after.denominator(model.first.weight), frozen)
    assert loss(model, 0, 0).item() < loss(Net(), 0, 0).item()


def test_a_schedule_of_refreshes_doubles_its_interval() -> None:
    steps = [step for step in range(START + 1, 30) if is_refresh(step, 2)]
    assert tuple(steps) == REFRESHED


def test_ranks_train_alone_and_then_as_rank_0() -> None:
    run = Training(f"onebit_adam(start={START}, per=32, alone=2)").run(1)
    assert not torch.equal(run.weights(0)[0], run.weights(1)[0])
    report = run.workers.wires[0].report()
    assert report.sent == report.payload == 0
    run.run(1)
    single = Net()
    lone = torch.optim.AdamW(single.parameters(), RATE, weight_decay=DECAY)
    for step in range(2):
        lone.zero_grad()
        loss(single, 0, step).backward()
        lone.step()
    close(run.weights(2), [p.detach() for p in single.parameters()])
    state = run.optimizers[2].state_dict()["state"][0]
    torch.testing.assert_close(state["exp_avg_sq"], lone.state_dict()["state"][0]["exp_avg_sq"])
    broadcast = run.workers.wires[0].report()
    size = 4 * 3 * sum(p.numel() for p in single.parameters())  # weights and two moments
    assert broadcast.payload == size and broadcast.sent == 2 * size  # rank 0 sends it to both


@pytest.mark.parametrize("alone", [START, START + 1, -1])
def test_a_start_that_is_all_alone_is_refused(alone: int) -> None:
    with pytest.raises(ValueError, match=f"alone={alone}"):
        gradwire.method(f"onebit_adam(start={START}, alone={alone})")


def test_a_start_may_have_a_table_of_codecs() -> None:
    made = gradwire.method(f"onebit_adam(start={START}, first={{0: fp32, 2: int4, 8: int8}})")
    assert [(step, str(chosen)) for step, chosen in made.table] == [(0, "fp32"), (2, "int4"), (START, "sign(per=4096)")]


@pytest.mark.parametrize(("start", "codecs"), [(450, "{0: twobit, 270: int4,"), (1, "{0: int4,"), (0, "sign")])
def test_two_bits_are_sent_before_the_variance_is_measured(start: int, codecs: str) -> None:
    assert str(gradwire.method(f"onebit_adam(start={start})")).startswith(codecs)
    assert str(gradwire.method(f"zero_one_adam(start={max(start, 1)})")).startswith("{0: int4,")


@pytest.mark.parametrize(("ratio", "masks"), [(0.001, True), (0.01, True), (0.05, False), (0.1, False), (1.0, False)])
def test_momentum_is_masked_where_few_entries_are_sent(ratio: float, masks: bool) -> None:
    assert gradwire.method(f"dgc_adam({ratio})").feedback == PreconditionedMomentum(masking=masks)
    assert gradwire.method(f"dgc_adam({ratio}, masking={not masks})").feedback == PreconditionedMomentum(
        masking=not masks
    )


def test_entries_become_fewer_after_the_start() -> None:
    made = gradwire.method(f"dgc_adam(0.05, start={START}, ramp=10, values=fp32)")
    expected = [(0, "int4"), (START, "topk(0.25)"), (START + 5, "topk(0.0625)"), (START + 10, "topk(0.05)")]
    assert [(step, str(chosen)) for step, chosen in made.table] == expected
    assert gradwire.method("dgc_adam(0.5, ramp=10)") == gradwire.method("dgc_adam(0.5)")


@pytest.mark.parametrize("spec", ["zero_one_adam(start=0)", "zero_one_adam(refresh=-1)"])
def test_a_refresh_needs_a_start(spec: str) -> None:
    with pytest.raises(ValueError, match="refresh="):
        gradwire.method(spec)


def test_parameters_of_16_bits_are_rounded_once_a_step() -> None:
    model = Net().bfloat16()
    optimizer = gradwire.AdamW(model.parameters(), RATE, weight_decay=DECAY)
    wire = gradwire.compress(model, "onebit_adam(start=1, per=32)", optimizer=optimizer)
    for step in range(2):
        before = model.second.weight.detach().clone()
        optimizer.zero_grad()
        loss(model, 0, step).backward()
        wire()
        optimizer.step()
    assert wire.state_dict()["momentum/second.weight"].dtype == torch.float32
    denominator = optimizer.frozen.denominators()[model.second.weight]
    momentum = model.second.weight.grad.float() / denominator
    expected = before.float() * (1 - RATE * DECAY) - RATE * momentum
    torch.testing.assert_close(model.second.weight.detach(), expected.bfloat16(), rtol=1e-2, atol=0)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("spec", SPECS[:4])
def test_a_scaler_changes_nothing_of_accumulated_and_clipped_steps(spec: str, fused: bool) -> None:
    nets = [Net(), Net()]
    one = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    for model, scaler in zip(nets, (None, one), strict=True):
        optimizer = gradwire.AdamW(model.parameters(), RATE, weight_decay=DECAY, fused=fused)
        wire = gradwire.compress(model, spec, optimizer=optimizer, scaler=scaler)
        for step in range(STEPS):
            optimizer.zero_grad()
            for part in (0, 1):  # two passes make a step
                whole = loss(model, part, step) / 2
                (whole if scaler is None else scaler.scale(whole)).backward()
            wire()
            if scaler is not None:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.2)
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
    assert one.get_scale() > 2.0**10
    assert all(map(torch.equal, nets[0].parameters(), nets[1].parameters()))


@pytest.mark.parametrize("divide", ["before", "after"])
def test_the_optimizers_state_has_the_common_momentum(divide: str) -> None:
    found = Training(f"onebit_adam(start={START}, per=32, floor=0.9, divide={divide!r})").run(STEPS)
    saved = [optimizer.state_dict()["state"][0]["exp_avg"].clone() for optimizer in found.optimizers]
    assert all(torch.equal(saved[0], each) for each in saved)
    wire, p = found.workers.wires[0], found.models[0].first.weight
    floored = found.optimizers[0].frozen.denominators()[p] if divide == "after" else 1.0
    momentum = wire.state_dict()["momentum/first.weight"].view_as(p)
    root = found.optimizers[0].denominator(p)
    assert (root < found.optimizers[0].frozen.denominators()[p]).any()
    # Torch's AdamW corrects it, and then takes the step that ours has taken.
    torch.testing.assert_close(saved[0] / root / (1 - BETA**START), momentum / floored)


def test_another_spec_takes_the_momentum_over() -> None:
    model = Net()
    optimizer = gradwire.AdamW(model.parameters(), RATE, weight_decay=DECAY)
    wire = gradwire.compress(model, f"onebit_adam(start={START}, per=32)", optimizer=optimizer)
    for step in range(STEPS):
        if step == STEPS - 1:
            before = optimizer.state_dict()["state"][0]["exp_avg"].clone()
            optimizer.state[model.first.weight]["exp_avg"].zero_()  # it is stale while the wire holds the momentum
            wire.set("dense")
        optimizer.zero_grad()
        loss(model, 0, step).backward()
        wire()
        optimizer.step()
    after = optimizer.state[model.first.weight]["exp_avg"]
    torch.testing.assert_close(after, BETA * before + (1 - BETA) * model.first.weight.grad)


@pytest.mark.parametrize("feedback", ["residual", "none"])
def test_errors_over_denominators_become_gradients_under_another_feedback(feedback: str) -> None:
    run = Training(f"onebit_adam(start={START}, per=32)").run(STEPS)
    for wire in run.workers.wires:
        denominator = wire.state_dict()["denominator/first.weight"]
        over = wire.state_dict()["residual/first.weight"]
        over = over + len(run.workers.wires) * wire.state_dict()["served/first.weight"]  # this rank's shard
        torch.testing.assert_close(wire.debts()["first.weight"].flatten(), over * denominator)
    owed = [wire.debts()["first.weight"] for wire in run.workers.wires]
    for wire in run.workers.wires:
        wire.set("int4", feedback=feedback)
    for wire, before in zip(run.workers.wires, owed, strict=True):
        torch.testing.assert_close(wire.debts()["first.weight"], before)
        assert not any(bool(x.any()) for name, x in wire.state_dict().items() if name == "residual/first.weight")


@pytest.mark.parametrize("world", [1, 2, 5])
def test_another_world_keeps_the_variance_and_the_mean_of_errors(world: int) -> None:
    old = Training(f"onebit_adam(start={START}, per=32)", world=4).run(STEPS)
    new = Training(f"onebit_adam(start={START}, per=32)", world=world)
    states = [wire.state_dict() for wire in old.workers.wires]
    for wire in new.workers.wires:
        wire.load_state_dict(states)
    taken = [wire.state_dict() for wire in new.workers.wires]
    for each in taken:
        assert torch.equal(each["denominator/first.weight"], states[0]["denominator/first.weight"])
    errors = [torch.stack([wire.debts()["first.weight"] for wire in t.workers.wires]).mean(0) for t in (old, new)]
    torch.testing.assert_close(*errors)


def test_a_gradient_that_is_not_finite_drops_the_step_and_the_variance_stays() -> None:
    run = Training(f"onebit_adam(start={START}, per=32)").run(START + 1)
    before = run.weights()
    state = {name: x.clone() for name, x in run.workers.wires[0].state_dict().items() if "/first" in name}
    for rank, model in enumerate(run.models):
        run.optimizers[rank].zero_grad()
        loss(model, rank, 99).backward()
    run.models[1].first.weight.grad[0, 0] = torch.nan
    run.workers()
    after = run.workers.wires[0].state_dict()
    assert all(torch.equal(after[name], x) for name, x in state.items() if not name.startswith("gradwire"))
    assert run.workers.wires[0].skipped == 1
    run.optimizers[0].step()
    close([run.weights()[0]], [before[0] * (1 - RATE * DECAY)])  # decay alone


@pytest.mark.parametrize("make", [None, torch.optim.AdamW, torch.optim.SGD])
def test_any_other_optimizer_is_refused(make: Any) -> None:
    model = Net()
    optimizer = None if make is None else make(model.parameters(), 0.1)
    with pytest.raises(ValueError, match=r"gradwire\.AdamW"):
        gradwire.compress(model, "onebit_adam", optimizer=optimizer)


def one_step(model: nn.Module, wire: gradwire.Wire, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    loss(model, 0, step).backward()
    wire()
    optimizer.step()


def test_another_adamw_than_the_given_one_is_refused() -> None:
    model = Net()
    given, other = gradwire.AdamW(model.parameters()), gradwire.AdamW(model.parameters())
    wire = gradwire.compress(model, "onebit_adam(start=2)", optimizer=given)
    with pytest.raises(ValueError, match=r"another gradwire\.AdamW"):
        one_step(model, wire, other, 0)


def test_an_adamw_of_some_parameters_is_refused() -> None:
    model = Net()
    with pytest.raises(ValueError, match=r"does not step 'second\.weight'"):
        gradwire.compress(model, "onebit_adam", optimizer=gradwire.AdamW(model.first.parameters()))
    rule = gradwire.Rule("int4", name="second.weight")
    gradwire.compress(model, "onebit_adam", optimizer=gradwire.AdamW(model.first.parameters()), rules=[rule])


def test_a_parameter_without_a_variance_is_named() -> None:
    model = Net()
    optimizer = gradwire.AdamW(model.parameters())
    wire = gradwire.compress(model, "onebit_adam(start=0)", optimizer=optimizer)
    with pytest.raises(RuntimeError, match=r"not stepped '(first|second)\.weight' yet.*requires_grad_\(False\)"):
        one_step(model, wire, optimizer, 0)


def test_a_wire_that_goes_on_without_its_optimizers_state_says_so() -> None:
    state: dict[str, Tensor] = {}
    for _ in range(2):
        model = Net()
        optimizer = gradwire.AdamW(model.parameters())
        wire = gradwire.compress(model, "onebit_adam(start=2, per=32)", optimizer=optimizer)
        if state:
            wire.load_state_dict(state)
            with pytest.raises(RuntimeError, match="load the optimizer's state beside the wire's"):
                one_step(model, wire, optimizer, 3)
            return
        for step in range(3):
            one_step(model, wire, optimizer, step)
        state = wire.state_dict()


def test_another_beta_is_refused() -> None:
    model = Net()
    with pytest.raises(ValueError, match=r"0\.8"):
        gradwire.compress(model, "onebit_adam", optimizer=gradwire.AdamW(model.parameters(), betas=(0.8, 0.99)))


def groups(model: nn.Module) -> gradwire.AdamW:
    first, second = list(model.first.parameters()), list(model.second.parameters())
    return gradwire.AdamW([{"params": first}, {"params": second, "betas": (0.8, 0.99), "lr": 0.02}], RATE)


def test_groups_of_several_first_betas_need_rules_of_their_own() -> None:
    with pytest.raises(ValueError, match=r"second\.weight"):
        gradwire.compress(model := Net(), "onebit_adam(start=2)", optimizer=groups(model))
    rule = gradwire.Rule("onebit_adam(start=2, beta=0.8)", name="second.*")
    optimizer = groups(model := Net())
    wire = gradwire.compress(model, "onebit_adam(start=2)", optimizer=optimizer, rules=[rule])
    for step in range(4):
        optimizer.zero_grad()
        loss(model, 0, step).backward()
        wire()
        optimizer.step()
    assert optimizer.frozen.denominators().keys() == {model.first.weight, model.second.weight}


def test_hosts_are_refused() -> None:
    with pytest.raises(ValueError, match="across='hosts'"):
        Training("onebit_adam", across="hosts")


def test_a_delayed_exchange_is_refused() -> None:
    with pytest.raises(ValueError, match="common_momentum"):
        Training("onebit_adam", exchange="delayed(inner=two_way)")


def step_once(spec: str, make: Any) -> None:
    model = Net()
    optimizer = make(model.parameters(), 0.01)
    wire = gradwire.compress(model, spec)
    for step in range(2):
        loss(model, 0, step).backward()
        wire()
        optimizer.step()


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adamax])
@pytest.mark.parametrize("spec", ["topk(0.01) | sign", "ef_signsgd", "powersgd(2)"])
def test_specs_that_starve_an_adaptive_optimizer_are_warned_of_once(spec: str, make: Any) -> None:
    with pytest.warns(gradwire.OptimizerWarning, match=make.__name__) as seen:
        step_once(spec, make)
    (text,) = [str(one.message) for one in seen if one.category is gradwire.OptimizerWarning]
    sent = "entries rarely" if "topk" in spec else "every entry coarsely in every step"
    assert text.startswith(f"'{spec}' under residual sends {sent}")


class Own(torch.optim.Optimizer):
    """Its options say nothing of the second moment that it keeps."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                square = self.state[p].setdefault("exp_avg_sq", torch.zeros_like(p))
                square.lerp_(p.grad.square(), 0.01)
                p.addcdiv_(p.grad, square.sqrt() + 1e-8, value=-group["lr"])


@pytest.mark.parametrize("make", [Own, torch.optim.Adadelta, torch.optim.Adafactor])
def test_an_optimizer_whose_state_alone_tells_is_warned_of_in_its_second_step(make: Any) -> None:
    with pytest.warns(gradwire.OptimizerWarning, match=make.__name__) as seen:
        step_once("topk(0.01) | sign", make)
    assert len([one for one in seen if one.category is gradwire.OptimizerWarning]) == 1


class Muon(Own):
    """Muon itself takes matrices alone."""


class Mixed(torch.optim.SGD):
    """Its first group is stepped without a second moment."""

    def __init__(self, params: Any, lr: float) -> None:
        first, *others = params
        super().__init__([{"params": [first]}, {"params": others, "betas": (0.9, 0.95)}], lr)


@pytest.mark.parametrize(("make", "remedy"), [(Mixed, "onebit_adam"), (Muon, "gradwire.local(model, optimizer, ")])
def test_any_group_counts_and_muon_has_a_remedy_of_its_own(make: Any, remedy: str) -> None:
    with pytest.warns(gradwire.OptimizerWarning) as seen:
        step_once("topk(0.01) | sign", make)
    (text,) = [str(one.message) for one in seen if one.category is gradwire.OptimizerWarning]
    assert remedy in text and ("'int4'" in text) == (make is Mixed)


@pytest.mark.parametrize(
    ("spec", "make"),
    [("topk(0.01) | sign", torch.optim.SGD), ("int4", torch.optim.AdamW), ("dense", torch.optim.AdamW)],
)
def test_others_are_not_warned_of(spec: str, make: Any) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        step_once(spec, make)
    assert not [one for one in seen if one.category is gradwire.OptimizerWarning]


@pytest.mark.parametrize("muon_first", [True, False])
def test_optimizers_of_one_wire_are_warned_of_once_with_what_serves_both(muon_first: bool) -> None:
    """Muon should not follow int4, and onebit_adam is for AdamW alone."""
    model = Net()
    wire = gradwire.compress(model, "topk(0.01) | sign")
    first, *others = model.parameters()
    optimizers = [Muon([first], 0.01), torch.optim.AdamW(others, 0.01)]
    with pytest.warns(gradwire.OptimizerWarning) as seen:
        loss(model, 0, 0).backward()
        wire()
        for optimizer in optimizers[:: 1 if muon_first else -1]:
            optimizer.step()
    (text,) = [str(one.message) for one in seen if one.category is gradwire.OptimizerWarning]
    assert "Use 'int8'" in text and "int4" not in text and "onebit_adam" not in text


def test_the_warning_is_given_once_whatever_changes_the_filters_of_warnings() -> None:
    """A wrapped optimizer is checked when it is wrapped, and again when the one inside steps first."""
    model = Net()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        optimizer = gradwire.DistributedOptimizer(
            torch.optim.AdamW(model.parameters(), 0.01), model.named_parameters(), "topk(0.01) | sign"
        )
        for spec in ("int4", "topk(0.01) | sign"):
            loss(model, 0, 0).backward()
            optimizer.step()
            optimizer.wire.set(spec)
        loss(model, 0, 1).backward()
        optimizer.step()
    assert len([one for one in seen if one.category is gradwire.OptimizerWarning]) == 1


def wrapped(spec: str, optimizer: Any, model: nn.Module) -> object:
    return gradwire.DistributedOptimizer(optimizer, model.named_parameters(), spec)


ATTACH = {
    "compress": (lambda spec, opt, model: gradwire.compress(model, spec), ("no optimizer", "pass optimizer=opt")),
    "lockstep": (lambda spec, opt, model: gradwire.lockstep([model], spec), ("no optimizer", "optimizers=[")),
    "wrapped": (wrapped, ("torch.optim.SGD was given", "DistributedOptimizer(opt, ")),
}


@pytest.mark.parametrize("how", ATTACH)
def test_a_method_that_lacks_its_adamw_is_named_as_it_was_written_with_the_remedy_of_the_call(how: str) -> None:
    attach, words = ATTACH[how]
    model = Net()
    for spec in ("onebit_adam(start=2)", "zero_one_adam"):
        with pytest.raises(ValueError, match=r"gradwire\.AdamW") as wrong:
            attach(spec, torch.optim.SGD(model.parameters(), 0.1), model)
        assert str(wrong.value).startswith(f"{spec!r} ") and "common_momentum" not in str(wrong.value)
        assert all(word in str(wrong.value) for word in words), wrong.value


def test_a_spec_that_is_set_later_is_named_and_so_is_that_of_a_rule() -> None:
    model = Net()
    wire = gradwire.compress(model, "int4")
    with pytest.raises(ValueError, match=r"^'onebit_adam' compresses .* no optimizer was given; build"):
        wire.set("onebit_adam")
    rule = gradwire.Rule("zero_one_adam", name="first.*")
    with pytest.raises(ValueError, match=r"^'zero_one_adam' compresses"):
        gradwire.compress(Net(), "int4", rules=[rule])
    with pytest.raises(ValueError, match=r"^feedback='common_momentum' compresses"):
        gradwire.compress(Net(), "sign", feedback="common_momentum")


@pytest.mark.parametrize(
    ("how", "remedy"), [("compress", "local("), ("lockstep", "local_lockstep("), ("wrapped", "local(")]
)
def test_local_steps_are_refused_with_the_call_that_takes_them(how: str, remedy: str) -> None:
    model = Net()
    with pytest.raises(ValueError, match="every step") as wrong:
        ATTACH[how][0]("sparseloco(H=5)", torch.optim.SGD(model.parameters(), 0.1), model)
    text = str(wrong.value)
    assert (
        text.startswith("'sparseloco(H=5)' ") and f"gradwire.{remedy}" in text and text.count("'sparseloco(H=5)'") == 2
    )


@pytest.mark.parametrize("spec", ["onebit_adam({})", "zero_one_adam({})", "dgc_adam(0.1, {})"])
@pytest.mark.parametrize(
    ("given", "start"), [("", 256), ("steps=4000", 600), ("steps=200", 100), ("start=50, steps=4000", 50)]
)
def test_a_start_by_the_length_of_the_training(spec: str, given: str, start: int) -> None:
    assert gradwire.method(spec.format(given).replace(", )", ")")).gradient_steps == start


@pytest.mark.parametrize("given", ["steps=0", "steps=300.5", "start=0.15", "start=-1"])
def test_a_start_and_a_training_have_whole_steps(given: str) -> None:
    with pytest.raises(ValueError, match=f"{given} must be"):
        gradwire.method(f"onebit_adam({given})")
