"""Lanes, plans, and the drive that steps them together."""

from gradwire.engine.lane import Lane
from gradwire.engine.lockstep import Lockstep
from gradwire.engine.method import Method, method
from gradwire.engine.plan import Plan, Rule, build, default_rules
from gradwire.engine.presets import dense, dgc, ef_signsgd, majority_vote, ramped
from gradwire.engine.session import Session

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
