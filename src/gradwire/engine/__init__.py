"""Engine: plans, lanes, and the step of one rank."""

from gradwire.engine.lane import Lane as Lane
from gradwire.engine.lockstep import Lockstep as Lockstep
from gradwire.engine.method import Method as Method
from gradwire.engine.method import method as method
from gradwire.engine.plan import Plan as Plan
from gradwire.engine.plan import Rule as Rule
from gradwire.engine.plan import build as build
from gradwire.engine.plan import default_rules as default_rules
from gradwire.engine.presets import ramped as ramped
from gradwire.engine.step import Engine as Engine
