"""Strategy: what the training loop asks of its workers.

`sync_strategy` has workers that agree on one gradient, `gossip_strategy` workers that gossip.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from gradwire_lab.train.data import Batch
from gradwire_lab.train.evaluation import Score
from gradwire_lab.train.models import State


class RecurrentPasses(Protocol):
    """Forward and backward of all workers.

    Attributes:
        states: What a recurrent model remembers, by worker; empty before the first step of an epoch.
    """

    states: list[list[State]]


class StrategyCheckpoint(Protocol):
    """What a strategy adds to a checkpoint."""

    def rank_states(self) -> list[dict[str, Tensor]]:
        """The state of each worker of this process."""

    def model_state(self) -> dict[str, Tensor]:
        """What model.safetensors holds. All processes take part."""

    def progress(self, folder: Path) -> dict[str, Any]:
        """Further fields of progress.json, after writing further files into the folder."""

    def load(self, folder: Path, progress: Mapping[str, Any]) -> list[dict[str, Tensor]] | None:
        """Load a checkpoint -> the states of this process's workers; none, if the world had another size.

        None where the checkpoint knows nothing of this worker: its neighbors bring it up to date.
        """

    def barrier(self) -> None:
        """Wait for all processes."""


class Strategy(Protocol):
    """The workers of this process, and how they learn from each other.

    Attributes:
        optimizer: Steps their parameters.
        workers_per_node: How many workers act as one.
    """

    optimizer: torch.optim.Optimizer
    workers_per_node: int

    @property
    def passes(self) -> RecurrentPasses: ...

    @property
    def checkpoint(self) -> StrategyCheckpoint: ...

    def step(self, batch: Batch, step: int, settings: Mapping[str, float], prefetch: Callable[[], None]) -> Tensor:
        """One step of all workers -> the mean of their losses, still on the device."""

    def group_step(self) -> int | None:
        """The step to go on from, if this worker has become a copy of a neighbor since the last call."""

    def check(self) -> None:
        """Raise `Diverged` if parameters are no longer finite."""

    def close(self) -> None:
        """Leave the group."""

    # evaluation and records

    def score(self, split: str = "test") -> Score:
        """Of the model that is saved."""

    def evaluate(self, splits: tuple[str, ...]) -> tuple[list[Score], dict[str, Any]]:
        """The scores by split, and further fields of the epoch's record."""

    def mean_loss(self, loss: Tensor) -> float:
        """The mean over all workers of a loss that is a mean over those of this process."""

    def common_seconds(self, seconds: float) -> float:
        """The clock that all workers go by."""

    def start_fields(self) -> dict[str, Any]:
        """Fields of the start record: the spec and the method."""

    def account(self, step: int) -> dict[str, Any]:
        """Bytes and seconds so far, as the first worker here counts them."""

    def group_account(self) -> dict[str, Any]:
        """What all workers count together."""

    def final_fields(self, step: int) -> dict[str, Any]:
        """Fields of the final record: bytes by rule and by layer."""

    def decisions(self) -> list[dict[str, Any]]:
        """What `auto` has decided since the last call."""
