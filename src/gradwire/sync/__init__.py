"""Lanes, plans, and the drive that steps them together."""

from gradwire.sync.lane import Lane
from gradwire.sync.lockstep import Lockstep
from gradwire.sync.method import Method, method
from gradwire.sync.plan import Plan, Rule, build, default_rules
from gradwire.sync.presets import dense, dgc, ef_signsgd, majority_vote, ramped
from gradwire.sync.session import Session

__all__ = [
    "Lane",
    "Lockstep",
    "Method",
    "Plan",
    "Rule",
    "Session",
    "build",
    "default_rules",
    "dense",
    "dgc",
    "ef_signsgd",
    "majority_vote",
    "method",
    "ramped",
]
