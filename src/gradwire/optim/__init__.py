"""Optimizers on our side of the wire."""

from gradwire.optim.adamw import AdamW

__all__ = ["AdamW"]
