"""The user's objects."""

from gradwire.adapters.checkpoint import load, save
from gradwire.adapters.compress import compress
from gradwire.adapters.optimizer import SGD, DistributedOptimizer
from gradwire.adapters.report import Report
from gradwire.adapters.virtual import VirtualWorkers, lockstep
from gradwire.adapters.wire import Wire

__all__ = ["SGD", "DistributedOptimizer", "Report", "VirtualWorkers", "Wire", "compress", "load", "lockstep", "save"]
