"""The user's objects."""

from gradwire.integrations.checkpoint import load, save
from gradwire.integrations.compress import compress
from gradwire.integrations.optimizer import SGD, DistributedOptimizer
from gradwire.integrations.optimizer_warning import OptimizerWarning
from gradwire.integrations.report import Report
from gradwire.integrations.simulated import SimulatedWorkers, lockstep
from gradwire.integrations.wire import Wire

__all__ = [
    "SGD",
    "DistributedOptimizer",
    "OptimizerWarning",
    "Report",
    "SimulatedWorkers",
    "Wire",
    "compress",
    "load",
    "lockstep",
    "save",
]
