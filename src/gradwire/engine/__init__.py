"""Engine: plans, lanes, and the step of one rank.

method, presets          what a spec stands for; whole methods by name: dgc, onebit_adam, ...
plan, lane, encoders     which lane has a parameter, what a lane does, and with which kernels
step, state, checkpoint  the step of one rank, the memories of lanes, and how they are saved
status, overflow         what ranks report to each other; steps that are skipped because a gradient is not finite
drive, cuda_graphs       executors: eager, and captured (`capture`, `graph_buffers`)
lockstep, batched        executors of all ranks of one process: one after the other, or all at once
hosts                    an engine that wraps another: ranks that share a host
"""

from gradwire.engine.drive import RoundGenerator as RoundGenerator
from gradwire.engine.drive import execute as execute
from gradwire.engine.drive import interleave as interleave
from gradwire.engine.gradients import Grads as Grads
from gradwire.engine.lane import Lane as Lane
from gradwire.engine.lockstep import Lockstep as Lockstep
from gradwire.engine.method import Method as Method
from gradwire.engine.method import Spec as Spec
from gradwire.engine.method import method as method
from gradwire.engine.plan import Plan as Plan
from gradwire.engine.plan import Rule as Rule
from gradwire.engine.plan import build as build
from gradwire.engine.plan import default_rules as default_rules
from gradwire.engine.presets import ramped as ramped
from gradwire.engine.step import BucketResult as BucketResult
from gradwire.engine.step import Engine as Engine
from gradwire.engine.step import StepResult as StepResult
