"""Local steps: workers train by themselves for a while, then agree on where to go on from."""

from gradwire.local.diloco import diloco
from gradwire.local.local_schedule import local_schedule
from gradwire.local.local_sgd import local_sgd, post_local_sgd
from gradwire.local.method import LocalMethod, local_method
from gradwire.local.muloco import muloco
from gradwire.local.sparseloco import sparseloco
from gradwire.local.streaming_diloco import streaming_diloco

__all__ = [
    "LocalMethod",
    "diloco",
    "local_method",
    "local_schedule",
    "local_sgd",
    "muloco",
    "post_local_sgd",
    "sparseloco",
    "streaming_diloco",
]
