"""Checkpoint: one rank's copies, residuals and step, as plain tensors by parameter name."""

from collections.abc import Mapping

import torch
from torch import Tensor

from gradwire.engine.checkpoint import facts_of, saved_spec
from gradwire.gossip import Node
from gradwire.integrations.gossip.flat_params import FlatParams


def save_state(node: Node, flat: FlatParams, description: str) -> dict[str, Tensor]:
    """One rank's state, as plain tensors."""
    numbers = {name: getattr(node, name) for name in ("number", "rank", "seed", "step")}
    numbers["world"] = node.topology.size
    return {**facts_of(description, flat.fingerprint(), numbers), **node.save()}


def check_state(state: Mapping[str, Tensor], node: Node, flat: FlatParams, description: str) -> None:
    """Refuse a state of another run.

    Raises:
        ValueError: It is one.
    """
    saved = saved_spec(state, ("format", "number", "rank", "seed", "step", "world"))
    if saved != description:
        raise ValueError(
            f"the state was saved under [{saved}], but this run has [{description}]; attach with the saved spec"
        )
    rank, size, world = int(state["gradwire/rank"]), int(state["gradwire/world"]), node.topology.size
    if (rank, size) != (node.rank, world):
        raise ValueError(
            f"the state is of rank {rank} of {size}, and this is rank {node.rank} of {world}; copies of neighbors "
            "belong to one place in one graph, so load each rank's own"
        )
    if not torch.equal(state["gradwire/model"], flat.fingerprint()):
        raise ValueError("the state was saved for another model: its parameters differ in name, number or shape")


def load_state(node: Node, state: Mapping[str, Tensor]) -> None:
    node.load(state)
    node.step, node.number = int(state["gradwire/step"]), int(state["gradwire/number"])
    node.seed = int(state["gradwire/seed"])
