"""Accelerate: its loop with one line of ours computes what a plain loop computes."""

import gc
import importlib.util
import os
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fixtures
import gradwire
from spawn import Answers, call_case, run_cases

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None,
    reason="Accelerate is not installed: pip install gradwire[accelerate]",
)
OPTIONS: dict[str, Any] = {"spec": "topk(0.1)", "bucket_mb": fixtures.BUCKET_MB}


def accelerator_of(rank: int, world: int, **options: Any) -> Any:
    """An Accelerator of this rank, as under torchrun."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": "1"}  # the group exists, so this port is not used
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(**{"cpu": True, **options})


def train_steps(accelerator: Any, model: nn.Module, optimizer: Any, steps: range, rank: int) -> None:
    """The loop of Accelerate's manual; two passes to a step."""
    for step in range(2 * steps.start, 2 * steps.stop):
        with accelerator.accumulate(model):
            accelerator.backward(fixtures.loss(model, rank, step))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()


def expected(rank: int, steps: range) -> tuple[gradwire.Wire, nn.Module]:
    net = fixtures.model()
    wire = gradwire.compress(net, **OPTIONS)
    optimizer = fixtures.sgd(net)
    for step in steps:
        for i in (0, 1):
            (fixtures.loss(net, rank, 2 * step + i) / 2).backward()
        wire()
        nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    return wire, net


def equal(wire: gradwire.Wire, net: nn.Module, other: tuple[gradwire.Wire, nn.Module]) -> bool:
    return fixtures.same(fixtures.tensors(net), fixtures.tensors(other[1])) and fixtures.same(
        wire.debts(), other[0].debts()
    )


def prepared(rank: int, world: int, seed: int = 0, **options: Any) -> tuple[Any, nn.Module, nn.Module, Any]:
    """An Accelerator, a net, the model that wraps it, and its optimizer."""
    accelerator = accelerator_of(rank, world, **options)
    net = fixtures.model(seed=seed)
    model, optimizer = accelerator.prepare(net, fixtures.sgd(net))
    return accelerator, net, model, optimizer


def one_line(rank: int, world: int, folder: Path) -> None:
    """Without checkpoints, `gradwire.compress` is enough."""
    halfway = expected(rank, range(3))
    accelerator, net, model, optimizer = prepared(rank, world, gradient_accumulation_steps=2)
    wire = gradwire.compress(model, **OPTIONS)
    train_steps(accelerator, model, optimizer, range(3), rank)
    assert equal(wire, net, halfway)
    assert (wire.report().steps, wire.report().payload) == (3, halfway[0].report().payload)


def resumed(rank: int, world: int, folder: Path) -> None:
    """Saved after three steps, and loaded into another model."""
    from gradwire.integrations.accelerate import attach

    for start, stop in ((0, 3), (3, 6)):
        accelerator, net, model, optimizer = prepared(rank, world, start, gradient_accumulation_steps=2)
        wire = attach(accelerator, model, **OPTIONS)
        if start:
            accelerator.load_state(str(folder))
        train_steps(accelerator, model, optimizer, range(start, stop), rank)
        if not start:
            accelerator.save_state(str(folder))
    assert equal(wire, net, expected(rank, range(6))), "resuming changes nothing"
    assert all(fixtures.same_on_all_ranks(p.detach()) for p in net.parameters())


def bfloat16(rank: int, world: int, folder: Path) -> None:
    from gradwire.integrations.accelerate import attach

    halfway = expected(rank, range(3))
    precision = {"gradient_accumulation_steps": 2, "mixed_precision": "bf16"}
    accelerator, net, model, optimizer = prepared(rank, world, **precision)
    wire = attach(accelerator, model, **OPTIONS)
    train_steps(accelerator, model, optimizer, range(3), rank)
    assert all(fixtures.same_on_all_ranks(p.detach()) for p in net.parameters())
    assert not equal(wire, net, halfway), "bfloat16 rounds"
    torch.testing.assert_close(net[0].weight, halfway[1][0].weight, rtol=0.1, atol=0.01)


def not_prepared(rank: int, world: int, folder: Path) -> None:
    from gradwire.integrations.accelerate import attach

    accelerator, net, _, _ = prepared(rank, world)
    text = fixtures.error_text(lambda: attach(accelerator, net, **OPTIONS))
    assert "Error" in text and "Sequential" in text and "DistributedDataParallel" in text, text


def momentum_twice(rank: int, world: int, folder: Path) -> None:
    """Momentum before compression and again after it."""
    from gradwire.integrations.accelerate import attach

    accelerator = accelerator_of(rank, world)
    net, other = fixtures.model(), fixtures.model()
    # The optimizer of another model does not matter.
    model, _, _ = accelerator.prepare(net, fixtures.sgd(net), fixtures.sgd(other, momentum=0.9))
    attach(accelerator, model, "dgc(0.1)")
    model, _ = accelerator.prepare(other, fixtures.sgd(other, momentum=0.9))
    text = fixtures.error_text(lambda: attach(accelerator, model, "dgc(0.1)"))
    assert text.startswith("ValueError") and "SGD" in text and "gradwire.SGD" in text, text


def alone_by_mistake(rank: int, world: int, folder: Path) -> None:
    """Without a GPU and without cpu=True, a new Accelerate takes every process for the only one."""
    from gradwire.integrations.accelerate import attach

    accelerator = accelerator_of(rank, world, cpu=False)
    model = accelerator.prepare(fixtures.model())
    text = fixtures.error_text(lambda: attach(accelerator, model, **OPTIONS))
    if accelerator.num_processes == world:
        assert text == fixtures.NO_ERROR
    else:
        assert "Error" in text and "1 process" in text and "cpu=True" in text, text


def one_rank(rank: int, world: int, folder: Path) -> None:
    """The checkpoint of two ranks, resumed by one."""
    from gradwire.integrations.accelerate import attach

    accelerator, _, model, optimizer = prepared(rank, world)
    wire = attach(accelerator, model, **OPTIONS)
    accelerator.load_state(str(folder))
    assert wire.engine.unwrapped.step == 3
    train_steps(accelerator, model, optimizer, range(1), rank)
    assert wire.report().steps == 2  # nothing is accumulated


def remedies(rank: int, world: int, folder: Path) -> None:
    """Errors name what Accelerate's users call."""
    from gradwire.integrations.accelerate import attach, attach_local

    accelerator, _, model, _ = prepared(rank, world)
    gradients = fixtures.error_text(lambda: attach_local(accelerator, model, "int4"))
    assert "attach_local takes" in gradients and "attach(accelerator, model, 'int4')" in gradients, gradients
    rounds = fixtures.error_text(lambda: attach(accelerator, model, "sparseloco(H=5)"))
    assert "'sparseloco(H=5)'" in rounds and "attach_local(accelerator, model, 'sparseloco(H=5)')" in rounds, rounds
    onebit = fixtures.error_text(lambda: attach(accelerator, model, "onebit_adam"))
    assert "'onebit_adam'" in onebit and "accelerator.prepare(model, opt)" in onebit, onebit
    assert "torch.optim.SGD was given" in onebit and "common_momentum" not in onebit, onebit


def onebit_adam(rank: int, world: int, folder: Path) -> None:
    """Saved inside the start and after it, and loaded into other models, with the optimizer that was prepared."""
    from gradwire.integrations.accelerate import attach

    spec = {"spec": "onebit_adam(start=3, per=16)", "bucket_mb": fixtures.BUCKET_MB}
    plain = fixtures.model()
    adam = gradwire.AdamW(plain.parameters(), lr=0.01)
    wire = gradwire.compress(plain, optimizer=adam, **spec)
    for step in range(8):
        adam.zero_grad()
        fixtures.loss(plain, rank, step).backward()
        wire()
        adam.step()
    for start, stop in ((0, 2), (2, 5), (5, 8)):
        accelerator = accelerator_of(rank, world)
        net = fixtures.model(seed=start)
        model, optimizer = accelerator.prepare(net, gradwire.AdamW(net.parameters(), lr=0.01))
        other = attach(accelerator, model, **spec)
        if start:
            accelerator.load_state(str(folder / "onebit"))
        for step in range(start, stop):
            accelerator.backward(fixtures.loss(model, rank, step))
            optimizer.step()
            optimizer.zero_grad()
        accelerator.save_state(str(folder / "onebit"))
    assert equal(other, net, (wire, plain)), "resuming changes nothing"


def warned_once(rank: int, world: int, folder: Path) -> None:
    """Though every change of the filters makes Python forget which warnings it has shown."""
    from gradwire.integrations.accelerate import attach

    accelerator = accelerator_of(rank, world)
    net = fixtures.model()
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        attach(accelerator, model, "topk(0.01)")
        train_steps(accelerator, model, optimizer, range(2), rank)
    assert sum(one.category is gradwire.OptimizerWarning for one in seen) == (rank == 0)


def stop_inside(rank: int, world: int, folder: Path, spec: str) -> tuple[Any, Any, Any, Any]:
    """Saved inside a round, and loaded into another model, with the optimizer of each rank."""
    from gradwire.integrations.accelerate import attach_local

    plain = fixtures.model()
    adam = torch.optim.AdamW(plain.parameters(), lr=0.01)
    outer = gradwire.local(plain, adam, spec)
    for step in range(7):
        adam.zero_grad()
        fixtures.loss(plain, rank, step).backward()
        adam.step()
        outer()
    for start, stop in ((0, 4), (4, 7)):
        accelerator = accelerator_of(rank, world)
        net = fixtures.model(seed=start)
        model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01))
        handle = attach_local(accelerator, model, spec)
        if start:
            accelerator.load_state(str(folder))
        for step in range(start, stop):
            accelerator.backward(fixtures.loss(model, rank, step))
            optimizer.step()
            optimizer.zero_grad()
        if not start:
            accelerator.save_state(str(folder))
    assert handle.steps == 7 and fixtures.same(fixtures.tensors(net), fixtures.tensors(plain))
    return handle, accelerator, model, optimizer


def scheduled(rank: int, world: int, folder: Path) -> None:
    """A start, two rounds of one step, then one of four, which is open when the state is saved."""
    spec = "local_schedule({0: diloco(H=1, start=1), 3: diloco(H=4, rate=0.5)})"
    handle, *_ = stop_inside(rank, world, folder / "schedule", spec)
    assert (handle.method.H, handle.inside) == (4, 0) and handle.optimizer.param_groups[0]["lr"] == 0.5


def local_steps(rank: int, world: int, folder: Path) -> None:
    _, accelerator, model, optimizer = stop_inside(rank, world, folder / "local", "diloco(H=2, start=1)")
    accelerator.state.destroy_process_group = lambda group=None: None  # which serves the next case
    with warnings.catch_warnings(record=True) as none:
        warnings.simplefilter("always")
        accelerator.end_training()  # one step of the start, three rounds
    accelerator.backward(fixtures.loss(model, rank, 7))
    optimizer.step()
    with warnings.catch_warnings(record=True) as one:
        warnings.simplefilter("always")
        accelerator.end_training()
    found = [[str(each.message) for each in seen if "round" in str(each.message)] for seen in (none, one)]
    assert [len(texts) for texts in found] == [0, int(rank == 0)]
    assert rank or ("1 step " in found[1][0] and "7 or 9 steps" in found[1][0] and "outer.averaged()" in found[1][0])


def step_all(accelerator: Any, models: list[nn.Module], optimizers: list[Any], steps: range, rank: int) -> None:
    """Each model has batches of its own."""
    for step in steps:
        for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            accelerator.backward(fixtures.loss(model, rank, 100 * number + step))
            optimizer.step()
            optimizer.zero_grad()


def two_models(rank: int, world: int, folder: Path) -> None:
    """Each has its own optimizer and memories; `onebit_adam` needs the second of two optimizers."""
    from gradwire.integrations.accelerate import attach

    def pair(seed: int) -> tuple[Any, list[nn.Module], list[Any], list[gradwire.Wire]]:
        accelerator = accelerator_of(rank, world)
        nets = [fixtures.model(seed), fixtures.model(seed + 1)]
        adam = gradwire.AdamW(nets[1].parameters(), lr=0.01)
        *models, first, second = accelerator.prepare(*nets, fixtures.sgd(nets[0]), adam)
        wires = [attach(accelerator, models[0], "topk(0.1)"), attach(accelerator, models[1], "onebit_adam(start=2)")]
        return accelerator, models, [first, second], wires

    accelerator, models, optimizers, wires = pair(0)
    step_all(accelerator, models, optimizers, range(4), rank)
    accelerator.save_state(str(folder / "two"))
    accelerator.wait_for_everyone()
    again, others, steppers, loaded = pair(5)
    again.load_state(str(folder / "two"))
    assert all(fixtures.same(fixtures.memories(x), fixtures.memories(y)) for x, y in zip(wires, loaded, strict=True))
    step_all(accelerator, models, optimizers, range(4, 6), rank)
    step_all(again, others, steppers, range(4, 6), rank)
    assert all(fixtures.same(fixtures.tensors(x), fixtures.tensors(y)) for x, y in zip(models, others, strict=True))


def one_after_the_other(rank: int, world: int, folder: Path) -> None:
    """After `free_memory`, the first model's memories are neither saved nor loaded."""
    from gradwire.integrations.accelerate import attach

    accelerator = accelerator_of(rank, world)
    for width, place in ((5, "first"), (7, "second")):
        net = nn.Linear(10, width)
        model, optimizer = accelerator.prepare(net, fixtures.sgd(net))
        wire = attach(accelerator, model, "topk(0.1)")
        step_all(accelerator, [model], [optimizer], range(2), rank)
        before = fixtures.memories(wire)
        accelerator.save_state(str(folder / place))
        accelerator.wait_for_everyone()
        step_all(accelerator, [model], [optimizer], range(2, 3), rank)
        accelerator.load_state(str(folder / place))
        assert fixtures.same(before, fixtures.memories(wire))
        model, optimizer = accelerator.free_memory(model, optimizer)
    assert not [*(folder / "second").glob("gradwire-*")]


def local_steps_of_two(rank: int, world: int, folder: Path) -> None:
    """Two models under one Accelerator, each with an optimizer of its own, saved inside a round."""
    from gradwire.integrations.accelerate import attach_local

    def pair(seed: int) -> tuple[Any, list[nn.Module], list[Any]]:
        accelerator = accelerator_of(rank, world)
        nets = [fixtures.model(seed), fixtures.model(seed + 1)]
        *models, first, second = accelerator.prepare(*nets, *map(fixtures.sgd, nets))
        for number, model in enumerate(models):
            attach_local(accelerator, model, f"diloco(H={3 + number})")
        return accelerator, models, [first, second]

    accelerator, models, optimizers = pair(0)
    step_all(accelerator, models, optimizers, range(5), rank)
    accelerator.save_state(str(folder / "local two"))
    accelerator.wait_for_everyone()
    again, others, steppers = pair(5)
    again.load_state(str(folder / "local two"))
    for each in ((accelerator, models, optimizers), (again, others, steppers)):
        step_all(*each, range(5, 12), rank)
    for model, other in zip(models, others, strict=True):
        assert fixtures.same(fixtures.tensors(model), fixtures.tensors(other))
        assert all(fixtures.same_on_all_ranks(p.detach()) for p in model.parameters())


def local_steps_of_a_shared_optimizer(rank: int, world: int, folder: Path) -> None:
    from gradwire.integrations.accelerate import attach_local

    accelerator, nets = accelerator_of(rank, world), [fixtures.model(0), fixtures.model(1)]
    both = torch.optim.SGD([p for net in nets for p in net.parameters()], lr=0.1)
    *models, _ = accelerator.prepare(*nets, both)
    attach_local(accelerator, models[0], "diloco(H=2)")
    text = fixtures.error_text(lambda: attach_local(accelerator, models[1], "diloco(H=2)"))
    assert text.startswith("ValueError") and "an optimizer for each model" in text, text


def never_prepared(rank: int, world: int, folder: Path) -> None:
    """A DistributedDataParallel that the Accelerator does not know of."""
    from gradwire.integrations.accelerate import attach

    accelerator = accelerator_of(rank, world)
    text = fixtures.error_text(lambda: attach(accelerator, fixtures.ddp(fixtures.model()), **OPTIONS))
    assert text.startswith("ValueError") and "accelerator.prepare(model)" in text, text


TWO_RANKS = {
    "two models": two_models,
    "one after the other": one_after_the_other,
    "local steps of two": local_steps_of_two,
    "a shared optimizer": local_steps_of_a_shared_optimizer,
    "never prepared": never_prepared,
    "remedies": remedies,
    "onebit_adam": onebit_adam,
    "warned once": warned_once,
    "local steps": local_steps,
    "a schedule of rounds": scheduled,
    "one line": one_line,
    "resumed": resumed,
    "bfloat16": bfloat16,
    "not prepared": not_prepared,
    "momentum twice": momentum_twice,
    "alone by mistake": alone_by_mistake,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("accelerate")


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> Answers:
    return run_cases(call_case, 2, TWO_RANKS, folder)


@pytest.mark.parametrize("case", TWO_RANKS)
def test_two_ranks_compute_what_a_plain_loop_computes(case: str, two_ranks: Answers):
    assert two_ranks[case] == [None, None]


def test_one_rank_resumes_a_checkpoint_of_two(folder: Path, two_ranks: Answers):
    assert two_ranks["resumed"] == [None, None]
    assert {path.name for path in folder.glob("wire-*")} == {"wire-0.safetensors", "wire-1.safetensors"}
    assert run_cases(call_case, 1, {"one rank": one_rank}, folder)["one rank"] == [None]


def plain_accelerator() -> Any:
    """An Accelerator of one process that no launcher has started, which leaves models as they are."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(cpu=True, gradient_accumulation_steps=2)


def without_a_launcher(rank: int, world: int, folder: Path) -> None:
    """The optimizer calls the wire, also under a GradScaler, whose scale is a power of two."""
    from gradwire.integrations.accelerate import attach

    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=4.0)):
        call_by_the_optimizer(attach, scaler, rank)


def call_by_the_optimizer(attach: Any, scaler: Any, rank: int) -> None:
    accelerator, net = plain_accelerator(), fixtures.model()
    accelerator.scaler = scaler
    model, optimizer = accelerator.prepare(net, fixtures.sgd(net))
    assert model is net, "there is no DDP"
    wire = attach(accelerator, model, **OPTIONS)
    for step in range(6):
        with accelerator.accumulate(model):
            accelerator.backward(fixtures.loss(model, rank, step))
            optimizer.step()
            optimizer.zero_grad()
    plain = fixtures.model()
    other, stepper = gradwire.compress(plain, **OPTIONS), fixtures.sgd(plain)
    for step in range(3):
        for i in (0, 1):
            (fixtures.loss(plain, rank, 2 * step + i) / 2).backward()
        other()
        stepper.step()
        stepper.zero_grad()
    assert wire.report().steps == 3 and equal(wire, net, (other, plain))
    text = fixtures.error_text(lambda: optimizer.optimizer.step(lambda: 0.0))
    assert text.startswith("ValueError") and "closure" in text, text
    again = fixtures.error_text(wire)
    assert again.startswith("RuntimeError") and "remove the call" in again and wire.report().steps == 3, again


def onebit_adam_without_a_launcher(rank: int, world: int, folder: Path) -> None:
    """The wire is called before gradwire.AdamW reads the momentum, as in a plain loop."""
    from gradwire.integrations.accelerate import attach

    spec, plain = {"spec": "onebit_adam(start=3, per=16)", "bucket_mb": fixtures.BUCKET_MB}, fixtures.model()
    adam = gradwire.AdamW(plain.parameters(), lr=0.01)
    wire = gradwire.compress(plain, optimizer=adam, **spec)
    accelerator, net = plain_accelerator(), fixtures.model()
    model, optimizer = accelerator.prepare(net, gradwire.AdamW(net.parameters(), lr=0.01))
    other = attach(accelerator, model, **spec)
    for step in range(8):
        adam.zero_grad()
        optimizer.zero_grad()
        fixtures.loss(plain, rank, step).backward()
        wire()
        adam.step()
        fixtures.loss(model, rank, step).backward()
        optimizer.step()
    assert equal(other, net, (wire, plain))


def without_a_launcher_refused(rank: int, world: int, folder: Path) -> None:
    """No optimizer, or several, of which none sees all gradients first."""
    from gradwire.integrations.accelerate import attach

    accelerator, net = plain_accelerator(), fixtures.model()
    model = accelerator.prepare(net)
    none = fixtures.error_text(lambda: attach(accelerator, model, **OPTIONS))
    assert none.startswith("ValueError") and "0 prepared optimizers" in none and "torchrun" in none, none
    accelerator.prepare(*(torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (net[0], net[2])))
    two = fixtures.error_text(lambda: attach(accelerator, model, **OPTIONS))
    assert two.startswith("ValueError") and "2 prepared optimizers" in two, two


def attached_again(rank: int, world: int, folder: Path) -> None:
    """A second handle of a model: the first one is neither warned of nor kept in memory."""
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=4.0)):
        accelerator, net = plain_accelerator(), fixtures.model()
        accelerator.scaler = scaler
        attach_again(accelerator, *accelerator.prepare(net, fixtures.sgd(net)), folder / f"again {scaler is None}")


def attach_again(accelerator: Any, model: nn.Module, optimizer: Any, folder: Path) -> None:
    from gradwire.integrations.accelerate import attach_local

    first = attach_local(accelerator, model, "diloco(H=4)")
    step_all(accelerator, [model], [optimizer], range(2), 0)
    accelerator.save_state(str(folder))
    accelerator.load_state(str(folder))
    weights = weakref.ref(first.outer)
    del first
    second = attach_local(accelerator, model, "diloco(H=4)")
    step_all(accelerator, [model], [optimizer], range(4), 0)
    gc.collect()
    assert weights() is None and (second.steps, second.inside) == (4, 0)
    accelerator.state.destroy_process_group = lambda group=None: None  # which serves the next case
    with warnings.catch_warnings(record=True) as none:
        warnings.simplefilter("always")
        accelerator.end_training()
    step_all(accelerator, [model], [optimizer], range(3), 0)
    with warnings.catch_warnings(record=True) as one:
        warnings.simplefilter("always")
        accelerator.end_training()
    found = [[str(each.message) for each in seen if "round" in str(each.message)] for seen in (none, one)]
    assert [len(texts) for texts in found] == [0, 1] and "3 steps" in found[1][0], found


ALONE = {
    "attached again": attached_again,
    "without a launcher": without_a_launcher,
    "without a launcher, onebit_adam": onebit_adam_without_a_launcher,
    "without a launcher, refused": without_a_launcher_refused,
}


@pytest.fixture(scope="module")
def alone(folder: Path) -> Answers:
    return run_cases(call_case, 1, ALONE, folder)


@pytest.mark.parametrize("case", ALONE)
def test_one_process_without_ddp_compresses_when_the_optimizer_steps(case: str, alone: Answers):
    assert alone[case] == [None]
