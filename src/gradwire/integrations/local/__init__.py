"""Handles of local steps: replicas that train by themselves, and agree on weights every few steps."""

from gradwire.integrations.local.attach import local
from gradwire.integrations.local.handle import LocalSync
from gradwire.integrations.local.report import LocalReport
from gradwire.integrations.local.simulated import SimulatedLocal, local_lockstep

__all__ = ["LocalReport", "LocalSync", "SimulatedLocal", "local", "local_lockstep"]
