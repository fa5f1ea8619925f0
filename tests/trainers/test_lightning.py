"""Lightning: a Trainer with our callback computes what a plain loop computes, and resumes from its checkpoints."""

import importlib.util
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fixtures
import gradwire
from spawn import Answers, call_case, run_cases

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None, reason="Lightning is not installed: pip install gradwire[lightning]"
)
# Importing Lightning takes seconds, so ranks alone import it, and one group of ranks serves all cases.

BATCH, STEPS = 8, 6  # of one rank, in an epoch
SPEC = "topk(0.1)"


def examples(rank: int) -> Tensor:
    return torch.cat([fixtures.batch(rank, step, BATCH) for step in range(STEPS)])


def adamw(model: nn.Module) -> gradwire.AdamW:
    return gradwire.AdamW(model.parameters(), lr=0.01)


def module(momentum: float, adaptive: bool = False, manual: bool = False) -> Any:
    from lightning.pytorch import LightningModule

    class Small(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = fixtures.model()
            self.automatic_optimization = not manual

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss = self.net(batch[0]).square().mean()
            if manual:
                self.optimizers().zero_grad()
                self.manual_backward(loss)
                self.optimizers().step()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(self) if adaptive else fixtures.sgd(self, momentum=momentum)

    return Small()


def fit(
    rank: int,
    world: int,
    epochs: int = 1,
    spec: str = SPEC,
    start: Path | None = None,
    momentum: float = 0.0,
    adaptive: bool = False,
    more: Sequence[Any] = (),
    **options: Any,
) -> tuple[Any, Any, Any]:
    """The Trainer, its callback and the net, after some epochs on a CPU; in a world of one, without DDP."""
    from lightning.pytorch import Trainer

    from gradwire.integrations.lightning import LightningCompression

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "TORCHELASTIC_RUN_ID": "x"}
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    compression = LightningCompression(spec, bucket_mb=fixtures.BUCKET_MB)
    where = {"accelerator": "cpu", "devices": world, "strategy": "ddp" if world > 1 else "auto"}
    options = {"use_distributed_sampler": False, **where, **quiet, **options}
    trainer = Trainer(max_epochs=epochs, callbacks=[compression, *more], **options)
    fitted = module(momentum, adaptive)
    trainer.fit(fitted, DataLoader(TensorDataset(examples(rank)), BATCH), ckpt_path=start)
    return trainer, compression, fitted.net


def loop(
    rank: int, world: int, epochs: int = 1, passes: int = 1, clip: float = 0.0, spec: str = SPEC
) -> tuple[gradwire.Wire, nn.Module]:
    """The same without Lightning."""
    net = fixtures.model()
    optimizer = adamw(net) if spec.startswith("onebit") else fixtures.sgd(net)
    wire = gradwire.compress(net, spec, optimizer=optimizer, bucket_mb=fixtures.BUCKET_MB)
    for _ in range(epochs):
        for step, batch in enumerate(examples(rank).split(BATCH)):
            (net(batch).square().mean() / passes).backward()
            if (step + 1) % passes == 0:
                wire()
                if clip:
                    nn.utils.clip_grad_norm_(net.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
    return wire, net


def equal(wire: gradwire.Wire, net: nn.Module, expected: tuple[gradwire.Wire, nn.Module]) -> bool:
    """Parameters and memories, bit for bit."""
    theirs = {name.removeprefix("net."): x for name, x in wire.debts().items()}
    return fixtures.same(fixtures.tensors(net), fixtures.tensors(expected[1])) and fixtures.same(
        theirs, expected[0].debts()
    )


def two_epochs(rank: int, world: int, folder: Path) -> dict[str, Tensor]:
    """The errors pending at the end."""
    _, compression, net = fit(rank, world, epochs=2)
    expected = loop(rank, world, epochs=2)
    assert equal(compression.wire, net, expected)
    assert all(fixtures.same_on_all_ranks(p.detach()) for p in net.parameters())
    report, plain = compression.wire.report(), expected[0].report()
    assert (report.steps, report.payload, report.sent) == (2 * STEPS, plain.payload, plain.sent)
    return {name: debt.double() for name, debt in compression.wire.debts().items()}


def accumulated(rank: int, world: int, folder: Path) -> None:
    _, compression, net = fit(rank, world, accumulate_grad_batches=2, gradient_clip_val=0.05)
    assert compression.wire.report().steps == STEPS // 2
    assert equal(compression.wire, net, loop(rank, world, passes=2, clip=0.05))


def bfloat16(rank: int, world: int, folder: Path) -> None:
    _, compression, net = fit(rank, world, precision="bf16-mixed")
    assert compression.wire.report().steps == STEPS and compression.wire.skipped == 0
    assert all(fixtures.same_on_all_ranks(p.detach()) for p in net.parameters())


def resumed(rank: int, world: int, folder: Path) -> None:
    stopped, _, _ = fit(rank, world, epochs=1)
    stopped.save_checkpoint(folder / "stopped.ckpt")
    _, feedback_after, net = fit(rank, world, epochs=2, start=folder / "stopped.ckpt")
    assert equal(feedback_after.wire, net, loop(rank, world, epochs=2)), "resuming changes nothing"
    assert feedback_after.wire.report().steps == STEPS, "the report is of the second fit alone"


def onebit_adam(rank: int, world: int, folder: Path) -> None:
    """Stopped inside the start, and after it."""
    for start in (8, 4):
        spec, saved = f"onebit_adam(start={start}, per=16)", folder / f"onebit-{start}.ckpt"
        stopped, _, _ = fit(rank, world, epochs=1, spec=spec, adaptive=True)
        stopped.save_checkpoint(saved)
        _, after, net = fit(rank, world, epochs=2, spec=spec, adaptive=True, start=saved)
        assert equal(after.wire, net, loop(rank, world, epochs=2, spec=spec)), "resuming changes nothing"


def warned_once(rank: int, world: int, folder: Path) -> None:
    """Though the callback checks the optimizer when a fit begins, and the wire checks it when it steps."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        fit(rank, world, adaptive=True)
    found = [str(one.message) for one in seen if one.category is gradwire.OptimizerWarning]
    assert len(found) == (rank == 0) and all("configure_optimizers" in text for text in found), found


def scaled(rank: int, world: int, folder: Path) -> None:
    """Lightning's GradScaler, and an overflow on one rank, which makes both back off."""
    from lightning.pytorch.callbacks import LambdaCallback
    from lightning.pytorch.plugins import MixedPrecision

    def overflow(trainer: Any, module: Any, batch: list[Tensor], batch_idx: int) -> None:
        batch[0].mul_(torch.inf if rank == 1 and batch_idx == 2 else 1.0)

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    _, compression, net = fit(rank, world, plugins=[plugin], more=[LambdaCallback(on_train_batch_start=overflow)])
    assert compression.wire.scaler is scaler
    assert (compression.wire.report().steps, compression.wire.skipped, scaler.get_scale()) == (STEPS, 1, 2.0**7)
    assert all(fixtures.same_on_all_ranks(p.detach()) and bool(p.isfinite().all()) for p in net.parameters())


def one_device(rank: int, world: int, folder: Path) -> None:
    """On a single device there is no DDP, and still compression."""
    from lightning.pytorch.loggers import CSVLogger

    _, compression, net = fit(rank, world, logger=CSVLogger(folder, version=0), log_every_n_steps=1)
    assert equal(compression.wire, net, loop(rank, world))
    assert compression.wire.report().payload_ratio > 5
    names = (folder / "lightning_logs" / "version_0" / "metrics.csv").read_text().splitlines()[0].split(",")
    assert {"gradwire/sent_mb", "gradwire/payload_ratio", "gradwire/skipped"} <= set(names)


def refused(rank: int, world: int, folder: Path) -> None:
    typo = fixtures.error_text(lambda: fit(rank, world, spec="tpok(0.1)"))
    assert typo.startswith("ValueError") and "'tpok'" in typo and "topk" in typo, typo
    twice = fixtures.error_text(lambda: fit(rank, world, spec="dgc(0.1)", momentum=0.9))
    assert twice.startswith("ValueError") and "SGD" in twice and "momentum=0" in twice, twice


def from_two_ranks(rank: int, world: int, folder: Path) -> None:
    """A checkpoint of two ranks, resumed by one, keeps the mean of their pending errors."""
    states = torch.load(folder / "stopped.ckpt", weights_only=True)["gradwire"]
    _, compression, _ = fit(0, 1, epochs=1, start=folder / "stopped.ckpt")
    assert compression.wire.report().steps == 0
    for name, debt in compression.wire.debts().items():
        mean = torch.stack([state[f"residual/{name}"] for state in states]).mean(0)
        torch.testing.assert_close(debt.flatten(), mean)


def from_dense(rank: int, world: int, folder: Path) -> None:
    """A checkpoint that was saved without compression."""
    checkpoint = torch.load(folder / "stopped.ckpt", weights_only=True)
    del checkpoint["gradwire"]
    torch.save(checkpoint, folder / "dense.ckpt")
    with pytest.warns(UserWarning, match="checkpoint"):
        _, compression, _ = fit(0, 1, epochs=2, start=folder / "dense.ckpt")
    assert compression.wire.report().steps == STEPS


def remedies(rank: int, world: int, folder: Path) -> None:
    """Errors name what Lightning's users call."""
    rounds = fixtures.error_text(lambda: fit(rank, world, spec="sparseloco(H=5)"))
    assert "'sparseloco(H=5)'" in rounds and "LightningLocalSteps('sparseloco(H=5)')" in rounds, rounds
    onebit = fixtures.error_text(lambda: fit(rank, world, spec="onebit_adam"))
    assert "'onebit_adam'" in onebit and "configure_optimizers" in onebit, onebit
    assert "torch.optim.SGD was given" in onebit and "common_momentum" not in onebit, onebit
    gradients = fixtures.error_text(lambda: local_fit("int4"))
    assert "LightningLocalSteps takes" in gradients and "LightningCompression('int4')" in gradients, gradients


def in_the_start(rank: int, world: int, folder: Path) -> None:
    """A fit that never leaves its start is warned of when it begins."""
    with pytest.warns(UserWarning, match=rf"'diloco\(H=2, start=9\)' takes 9 of {STEPS} steps.*start=1"):
        callback = local_fit("diloco(H=2, start=9)")
    assert callback.outer is not None and f"in the start: {STEPS} of 9 steps" in str(callback.outer.report())


def local_fit(spec: str, more: Sequence[Any] = (), epochs: int = 1, start: Path | None = None) -> Any:
    """The callback of local steps, after some epochs in one process."""
    from lightning.pytorch import Trainer

    from gradwire.integrations.lightning import LightningLocalSteps

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    callback = LightningLocalSteps(spec)
    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=epochs, callbacks=[callback, *more], **quiet)
    trainer.fit(module(0.9), DataLoader(TensorDataset(examples(0)), BATCH), ckpt_path=start)
    return callback


def scheduled(rank: int, world: int, folder: Path) -> None:
    """Rounds that grow, stopped inside the second one, which is the first of the longer ones."""
    spec = "local_schedule({0: diloco(H=1, start=3), 4: diloco(H=4, rate=0.5)})"
    *_, callback = fit_twice(rank, world, folder / "schedule.ckpt", spec)
    assert (callback.outer.method.H, callback.outer.inside) == (4, 0)


def local_steps(rank: int, world: int, folder: Path) -> None:
    first, second, _ = fit_twice(rank, world, folder / "local.ckpt", "diloco(H=4, start=3)")
    # 6 and 12 steps, of which 3 are the start, leave 3 and 1 of a round
    for seen, k, ends in ((first, "3 steps", "3 or 7"), (second, "1 step", "11 or 15")):
        before, *texts = [text for text in seen if "inside a round" in text] or [""]
        assert len(texts) == (rank == 0)
        assert rank or before.endswith(f"set max_steps={ends}"), before
        assert rank or (f"whose {k} " in texts[0] and f"{ends} steps" in texts[0])
        assert rank or "callback.outer.averaged()" in texts[0]


def local_steps_by_hand(rank: int, world: int, folder: Path) -> None:
    """Under manual optimization, Lightning has DDP average again after each step, unless it is told not to."""
    fit_twice(rank, world, folder / "by hand.ckpt", "diloco(H=4)", manual=True)


def accumulating_more_and_less(rank: int, world: int, folder: Path) -> None:
    """How many steps a schedule of accumulation leaves is not known to Lightning, so no length is named."""
    from lightning.pytorch.callbacks import GradientAccumulationScheduler

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        callback = local_fit("local_sgd(H=5)", [GradientAccumulationScheduler({0: 3, 1: 1})], epochs=2)
    assert callback.outer.steps == STEPS // 3 + STEPS
    assert not [one for one in seen if "max_steps" in str(one.message)]


def ended_as_it_is(rank: int, world: int, folder: Path) -> None:
    """The module keeps its weights at the end of a fit, though the message of the last round is under way."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outer = local_fit("diloco(H=6, delay=1)").outer
    assert outer.inside == 0 and outer.fragments[0].pending_result is not None


def local_steps_from_dense(rank: int, world: int, folder: Path) -> None:
    """A checkpoint of a fit without local steps."""
    trainer, _, _ = fit(0, 1)
    trainer.callbacks.clear()
    trainer.save_checkpoint(folder / "plain.ckpt")
    with pytest.warns(UserWarning, match="without local steps"):
        callback = local_fit("local_sgd(H=2)", epochs=2, start=folder / "plain.ckpt")
    assert callback.outer.steps == STEPS


def optimizer_of_others(rank: int, world: int, folder: Path) -> None:
    """The first of two optimizers steps a tensor that is not the module's, and `onebit_adam` needs the second."""
    from lightning.pytorch import Trainer

    from gradwire.integrations.lightning import LightningCompression

    fitted, other = module(0.0, manual=True), nn.Parameter(torch.zeros(1))
    fitted.configure_optimizers = lambda: [torch.optim.SGD([other], lr=0.1), adamw(fitted)]
    compression = LightningCompression("onebit_adam(start=8)")
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(accelerator="cpu", devices=world, strategy="ddp", max_epochs=0, callbacks=[compression], **quiet)
    trainer.fit(fitted, DataLoader(TensorDataset(examples(rank)), BATCH))
    assert trainer.optimizers[1].frozen.wire is compression.wire


def fit_twice(rank: int, world: int, file: Path, spec: str, manual: bool = False) -> tuple[list[str], list[str], Any]:
    """A fit of two epochs, the second one resumed inside a round, computes what a plain loop computes.

    Returns the warnings of both, and the callback of the second.
    """
    from lightning.pytorch import Trainer

    from gradwire.integrations.lightning import LightningLocalSteps

    net = fixtures.model()
    optimizer = fixtures.sgd(net, momentum=0.9)
    outer = gradwire.local(net, optimizer, spec)
    for batch in [*examples(rank).split(BATCH)] * 2:
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()
        outer()
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    warned = []
    for epochs, start in ((1, None), (2, file)):
        callback, fitted = LightningLocalSteps(spec), module(0.9, manual=manual)
        where: dict[str, Any] = {"accelerator": "cpu", "devices": world, "strategy": "ddp"}
        options = {"use_distributed_sampler": False, **where, **quiet}
        trainer = Trainer(max_epochs=epochs, callbacks=[callback], **options)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            trainer.fit(fitted, DataLoader(TensorDataset(examples(rank)), BATCH), ckpt_path=start)
        warned.append([str(one.message) for one in seen])
        if start is None:
            trainer.save_checkpoint(file)
    assert callback.outer is not None and callback.outer.steps == 2 * STEPS
    assert fixtures.same(fixtures.tensors(fitted.net), fixtures.tensors(net))
    return warned[0], warned[1], callback


TWO_RANKS = {
    "onebit_adam": onebit_adam,
    "warned once": warned_once,
    "local steps": local_steps,
    "local steps by hand": local_steps_by_hand,
    "an optimizer of others": optimizer_of_others,
    "a schedule of rounds": scheduled,
    "two epochs": two_epochs,
    "accumulated and clipped": accumulated,
    "bfloat16": bfloat16,
    "scaled": scaled,
    "resumed": resumed,
}
ONE_RANK = {
    "one device": one_device,
    "refused": refused,
    "remedies": remedies,
    "in the start": in_the_start,
    "accumulating more and less": accumulating_more_and_less,
    "ended as it is": ended_as_it_is,
    "local steps from dense": local_steps_from_dense,
    "from two ranks": from_two_ranks,
    "from dense": from_dense,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lightning")


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> Answers:
    return run_cases(call_case, 2, TWO_RANKS, folder)


@pytest.fixture(scope="module")
def one_rank(folder: Path, two_ranks: Answers) -> Answers:
    return run_cases(call_case, 1, ONE_RANK, folder)


@pytest.mark.parametrize("case", TWO_RANKS)
def test_two_ranks_compute_what_a_plain_loop_computes(case: str, two_ranks: Answers):
    first, second = two_ranks[case]
    if case == "two epochs":
        assert any(not torch.equal(first[name], second[name]) for name in first), "each rank has errors of its own"


def test_a_checkpoint_holds_the_state_of_all_ranks(folder: Path, two_ranks: Answers):
    assert two_ranks["resumed"] == [None, None]
    saved = torch.load(folder / "stopped.ckpt", weights_only=True)["gradwire"]
    assert [int(state["gradwire/rank"]) for state in saved] == [0, 1]


@pytest.mark.parametrize("case", ONE_RANK)
def test_one_rank_compresses_and_resumes_without_ddp(case: str, one_rank: Answers):
    assert one_rank[case] == [None]
