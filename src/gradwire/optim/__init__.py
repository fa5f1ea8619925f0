"""Optimizers on our side of the wire."""

from gradwire.optim.adamw import AdamW
from gradwire.optim.sgd import SGD

__all__ = ["SGD", "AdamW"]
