"""Methods: ways to synchronize a step, torch's own and ours, each as well tuned as we know how.

``ddp-none`` does not communicate at all. Other names that begin with ``ddp-`` are torch's: DDP with overlapped
buckets whose storage is the gradients', plain or with one of its hooks. ``gossip:`` averages parameters after the
step, and ``local:`` takes local steps, as in ``local:sparseloco(H=15)`` and ``local:diloco(H=30); codec=int4``; their
step is a mean over whole rounds. ``auto`` is measured once it has decided. Everything else is a spec of ours under DDP.
Options follow after semicolons, as keywords of `gradwire.compress`: ``ef_signsgd; exchange=two_way``.
"""

# No `from __future__ import annotations` here: DDP compares the hooks' annotations with the types themselves.

import gc
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradwire.comm import Traffic
from gradwire.comm.alphabeta import AlphaBeta, cost
from gradwire.comm.collectives import AllReduceOp, traffic
from gradwire.comm.emulated import SHARED_LINK, VARIABLE
from gradwire.comm.rates import LinkSpec
from gradwire.engine import method
from gradwire.integrations import compress
from gradwire.integrations.consistency import find_backend
from gradwire.integrations.gossip import GossipSync, gossip
from gradwire.integrations.local.attach import setup_of
from gradwire.integrations.local.handle import LocalSync
from gradwire.integrations.setup import Options
from gradwire.integrations.wire import Wire
from gradwire.local import LocalMethod, local_method
from gradwire_lab.autotune.tuner import AutoTuner
from gradwire_lab.bench.network.workloads import Loss, Workload
from gradwire_lab.perf_model.candidates import OPTIONS, read_options

DENSE = ("ddp-fp32", "ddp-fp16", "ddp-bf16")
NO_COMM = "ddp-none"
AUTO = "auto"
POWERSGD = "ddp-powersgd"
OURS = (
    "topk(0.001) | fp16; bundle=none",
    "topk(0.003) | sign; bundle=none; bucket_mb=200",
    "dgc(0.001)",
    "topk(0.01) | sign",
    "powersgd(4)",
    "ef_signsgd; exchange=two_way",
    "int4; exchange=two_way",
    "int8; exchange=two_way",
    "qsgd",
    "terngrad",
    "majority_vote",
    "bf16",
)
ALL = (NO_COMM, *DENSE, POWERSGD, *OURS)

Hook = Callable[[Any, GradBucket], torch.futures.Future[Tensor]]


def parse(name: str) -> tuple[str, dict[str, Any]]:
    """The spec and the keywords of a method of ours.

    Raises:
        ValueError: The spec, or an option, is none.
    """
    if "launch_mb=" in name:
        warnings.warn(f"launch_mb= of {name!r} is now bucket_mb=", FutureWarning, stacklevel=2)
    spec, texts = read_options(name.replace("launch_mb=", "bucket_mb="), (*OPTIONS, *_READERS, "codec"))
    return spec, {key: _read(key, value or "", name) if key in _READERS else value for key, value in texts.items()}


# By option: how it is read, and an example.
_READERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "bucket_mb": (float, "50"),
    "rollback": ({"true": True, "false": False}.__getitem__, "false"),
}


def _read(key: str, text: str, name: str) -> Any:
    read, example = _READERS[key]
    try:
        return read(text)
    except (KeyError, ValueError):
        raise ValueError(f"cannot read {key}={text} of {name!r}; write for example {key}={example}") from None


def check(name: str) -> None:
    """Refuse a name that stands for nothing, with a sentence."""
    if name == AUTO:
        return
    if name.startswith("gossip:"):
        parse(name)
    elif name.startswith("local:"):
        local_method_of(name)
    elif name == "ddp" or name.startswith("ddp-"):
        known = (NO_COMM, *DENSE, POWERSGD)
        if name not in known:
            raise ValueError(f"torch has no {name!r} here; take {', '.join(known)}")
    else:
        spec, options = parse(name)
        method(spec, options.get("feedback"), options.get("exchange"))


@dataclass
class BuiltMethod:
    """One method, ready to step.

    Attributes:
        run: The model to call.
        after: What to do after the optimizer's step.
        account: Bytes of tensors that this rank has sent and received so far, where that is known.
        became: What ``auto`` has chosen.
        period: Steps of a round, of which most may send nothing.
        delay: Steps of the next round during which its message travels.
        steps: How many have been taken.
    """

    run: nn.Module
    after: Callable[[], object]
    account: Callable[[], Traffic | None]
    became: str = ""
    period: int = 1
    delay: int = 0
    steps: int = 0

    def step(self, loss: Loss, optimizer: torch.optim.Optimizer) -> None:
        """One step of training."""
        optimizer.zero_grad(set_to_none=False)  # gradients stay where DDP sends them from, which saves torch a copy
        loss(self.run).backward()
        optimizer.step()
        self.after()
        self.steps += 1


def build_method(name: str, workload: Workload, optimizer: Optimizer | None = None) -> BuiltMethod:
    """Build a method around the workload's model. Every rank must. Some methods need the optimizer that will step."""
    gc.collect()  # DDP takes its hooks off the parameters when it goes
    model = workload.model
    if name.startswith("gossip:"):
        spec, options = parse(name.removeprefix("gossip:"))
        net = gossip(model, spec, options.get("codec"))
        assert isinstance(net, GossipSync)
        return BuiltMethod(model, net, lambda: net.link.traffic)
    if name.startswith("local:"):
        return _local(name, model)
    if name.startswith("ddp-"):
        return _torch(name, model)
    if name == AUTO:
        return _decided(workload)
    # All gradients in one bucket deliver as early as several do: our buckets are cut by the plan.
    ddp = ddp_of(model)
    spec, options = parse(name)
    wire: Wire = compress(ddp, spec, optimizer=optimizer, **options)
    return BuiltMethod(ddp, lambda: None, lambda: wire.link.traffic)


def local_method_of(name: str) -> tuple[LocalMethod, dict[str, Any]]:
    """The round of a name that begins with ``local:``, and other keywords of `gradwire.local`."""
    spec, options = parse(name.removeprefix("local:"))
    parts = {key: options.pop(key, None) for key in ("codec", "feedback", "exchange")}
    return local_method(spec, **parts), options


def _local(name: str, model: nn.Module) -> BuiltMethod:
    chosen, options = local_method_of(name)
    setup = setup_of(model, find_backend(None, None, None), Options(**options))
    setup.shared = {}  # as for DDP: all ranks built the same model
    outer = LocalSync(model, setup, chosen)
    return BuiltMethod(model, outer, lambda: outer.wire.link.traffic, period=chosen.H, delay=chosen.delay)


def _decided(workload: Workload) -> BuiltMethod:
    """Step until the wire has decided how to go on; weights stay as they are."""
    ddp = ddp_of(workload.model)
    wire = compress(ddp, AUTO)
    assert isinstance(wire.tuner, AutoTuner)
    while not wire.decided:
        workload.model.zero_grad(set_to_none=False)
        workload.loss(ddp).backward()
    became = wire.decisions[-1].spec
    return BuiltMethod(ddp, lambda: None, lambda: None, became)  # what DDP sends by itself is not counted


def ddp_of(model: nn.Module, bucket_mb: float = 25.0) -> DistributedDataParallel:
    """DDP whose gradients are views of its buckets, and which sends nothing when it is built.

    All ranks built the same model from the same seed: to send it around would take minutes at 10 mbit.
    """
    options: dict[str, Any] = {"gradient_as_bucket_view": True, "init_sync": False, "broadcast_buffers": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer versions of torch have another name for an option
        return DistributedDataParallel(model, bucket_cap_mb=bucket_mb, **options)


def _torch(name: str, model: nn.Module) -> BuiltMethod:
    # Its PowerSGD hook mixes up collectives as soon as there are two buckets.
    ddp = ddp_of(model, 2**12 if name == POWERSGD else 25.0)
    n = sum(p.numel() for p in model.parameters() if p.requires_grad)
    hook, state, nbytes = _hook(name, n)
    thin = os.environ.get(VARIABLE)
    if thin and name not in (NO_COMM, "ddp-bf16"):  # of which the latter is DDP's to refuse
        hook = _emulated(hook, LinkSpec.parse(thin), 1.0 if name == "ddp-fp32" else 0.5)
    ddp.register_comm_hook(state, hook)
    built = BuiltMethod(ddp, lambda: None, lambda: None if nbytes is None else _dense_traffic(nbytes, built.steps))
    return built


def _hook(name: str, n: int) -> tuple[Hook, Any, int | None]:
    """The hook, its state, and how long the tensors are that it reduces in a step, if that is known."""
    if name in _HOOKS:
        hook, itemsize = _HOOKS[name]
        return hook, None, itemsize * n
    state = powerSGD_hook.PowerSGDState(
        dist.group.WORLD, matrix_approximation_rank=4, start_powerSGD_iter=2, warm_start=True
    )
    return powerSGD_hook.powerSGD_hook, state, None


# By name: the hook, and the bytes of an element that it sends.
_HOOKS: dict[str, tuple[Hook, int]] = {
    NO_COMM: (debugging_hooks.noop_hook, 0),
    "ddp-fp32": (default_hooks.allreduce_hook, 4),
    "ddp-fp16": (default_hooks.fp16_compress_hook, 2),
    "ddp-bf16": (default_hooks.bf16_compress_hook, 2),
}


def _dense_traffic(nbytes: int, steps: int) -> Traffic:
    """What steps have sent that each add up so many bytes."""
    dense = AllReduceOp(torch.empty(nbytes, dtype=torch.uint8, device="meta"), "sum")
    each = traffic(dense, dist.get_rank(), dist.get_world_size())
    return Traffic(steps * each.sent, steps * each.received, steps, steps * each.messages)


def _emulated(inner: Hook, link: LinkSpec, share: float) -> Hook:
    """A hook of torch's on an emulated link, over which a share of the buffer travels."""

    def hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        took = cost("all_reduce", share * bucket.buffer().nbytes, dist.get_world_size(), AlphaBeta.of(link))
        called = time.monotonic()

        def arrive(done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            due = SHARED_LINK.reserve(called, took)
            time.sleep(max(0.0, due - time.monotonic()))
            return done.value()[0] if isinstance(done.value(), list) else done.value()

        return inner(state, bucket).then(arrive)

    return hook
