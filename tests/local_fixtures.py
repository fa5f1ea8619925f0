"""Replicas in this process that take local steps."""

from typing import Any

import fixtures
import gradwire


def local_replicas(
    spec: Any, world: int, make: Any = None, net: Any = fixtures.model, **options: Any
) -> tuple[Any, ...]:
    """Replicas, their optimizers, and what synchronizes them."""
    nets = [net() for _ in range(world)]
    optimizers = [(make or fixtures.sgd)(net) for net in nets]
    return nets, optimizers, gradwire.local_lockstep(nets, optimizers, spec, **options)


def train(nets: Any, optimizers: Any, outer: Any, steps: range, same: bool = False) -> None:
    """So many steps of all replicas; with ``same``, on the first one's batches where nothing is sent."""
    for step in steps:
        for rank, net in enumerate(nets):
            net.zero_grad()
            fixtures.loss(net, 0 if same and outer.same_batches else rank, step).backward()
        outer.average_gradients()
        for optimizer in optimizers:
            for part in optimizer if isinstance(optimizer, list) else [optimizer]:
                part.step()
        outer()
