"""Integrations: the entry points, and what they do with the user's models, optimizers and trainers.

compress, wire           `gradwire.compress` and its handle, which plain loops call
ddp                      the communication hook of DistributedDataParallel
optimizer                `gradwire.DistributedOptimizer`, and checks of optimizers that are about to step
adamw_moments, adamw_checks   what a wire shares with `gradwire.AdamW`, and which ones it refuses
simulated                `gradwire.lockstep`: replicas of one process
gossip, local            `gradwire.gossip`, `gradwire.local`
sharded, dcp             models under FSDP2, and their checkpoints
grad_scaler              overflow under a GradScaler; else see `engine/overflow.py`
accelerate, lightning, transformers   trainers; trainer_warnings: warnings under trainers
setup, consistency       from options to a plan that all ranks agree on
entry_point              what the user called, so that errors name the remedies of that call
checkpoint, checksums    saved states
"""

from gradwire.integrations.checkpoint import load as load
from gradwire.integrations.checkpoint import save as save
from gradwire.integrations.compress import compress as compress
from gradwire.integrations.optimizer import DistributedOptimizer as DistributedOptimizer
from gradwire.integrations.optimizer_warning import OptimizerWarning as OptimizerWarning
from gradwire.integrations.report import Report as Report
from gradwire.integrations.simulated import SimulatedWorkers as SimulatedWorkers
from gradwire.integrations.simulated import lockstep as lockstep
from gradwire.integrations.wire import Wire as Wire
