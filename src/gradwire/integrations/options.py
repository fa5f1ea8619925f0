"""Options: everything beside the spec that `compress` and `DistributedOptimizer` take."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradwire.engine.plan import LAUNCH_BYTES, Rule
from gradwire.exchanges import Exchange
from gradwire.feedback import Feedback


@dataclass(frozen=True)
class Options:
    """How gradients are compressed; see `compress` for each."""

    feedback: str | Feedback | None = None
    exchange: str | Exchange | None = None
    granularity: str = "layer"
    rules: Sequence[Rule] = ()
    bundle: str | None = "fp16"
    scaler: torch.amp.GradScaler | None = None
    seed: int = 0
    launch_bytes: int = LAUNCH_BYTES
    rollback: bool = True
