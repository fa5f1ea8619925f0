"""Lanes, plans, and the drive that steps them together."""

from gradwire.engine.lane import Lane
from gradwire.engine.lockstep import Lockstep
from gradwire.engine.method import Method, method
from gradwire.engine.plan import Plan, Rule, build, default_rules
from gradwire.engine.presets import dense, dgc, ef_signsgd, majority_vote, ramped
from gradwire.engine.step import Engine

__all__ = [
    "Engine",
    "Lane",
    "Lockstep",
    "Method",
    "Plan",
    "Rule",
    "build",
    "default_rules",
    "dense",
    "dgc",
    "ef_signsgd",
    "majority_vote",
    "method",
    "ramped",
]
