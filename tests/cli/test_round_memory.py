"""What a plan says that a worker with local steps holds, beside what one does hold."""

import pytest
import torch
from torch import Tensor, nn

import gradwire
from gradwire.engine import build, default_rules
from gradwire.local import local_method
from gradwire_lab.cli.round_memory import RoundMemory


@pytest.mark.parametrize(
    "spec",
    ["diloco(H=1)", "sparseloco(H=1)", "sparseloco(H=1, keep=1.0)", "streaming_diloco(H=1, fragments=1, delay=0)"],
)
def test_a_worker_holds_what_is_told(spec: str) -> None:
    """Outer weights, momentum, errors, and what weights hold of these; a server keeps errors of half the model."""
    nets = [nn.Linear(64, 64) for _ in range(2)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    outer = gradwire.local_lockstep(nets, optimizers, spec)
    for net in nets:
        for p in net.parameters():
            p.data.add_(1.0)
    outer()
    (rank, _), rounds = outer.ranks, local_method(spec)
    message = build({name: tuple(p.shape) for name, p in nets[0].named_parameters()}, default_rules(rounds.message), 2)
    held = [*rank.outer.weights.values(), *rank.outer.kept.values(), *_tensors(rank.outer.optimizer)]
    held += [x for _, state in rank.fragments[0].wire.engine.unwrapped.lanes for x in state.tensors.values()]
    assert RoundMemory.of(rounds, message).lasting == sum(x.numel() for x in held)


@pytest.mark.parametrize(("codec", "keeps"), [(None, True), ("int4", False)])
def test_errors_from_before_a_round_are_needed_without_a_fused_kernel(codec: str | None, keeps: bool) -> None:
    """As docs/local.md says of the message of sparseloco with rollback=False."""
    nets = [nn.Linear(64, 64) for _ in range(2)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    outer = gradwire.local_lockstep(nets, optimizers, "sparseloco(H=1)", codec=codec, rollback=False)
    assert outer.ranks[0].fragments[0].wire.engine.unwrapped.rollback is keeps


def _tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
