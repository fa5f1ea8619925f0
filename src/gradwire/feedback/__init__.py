"""What happens to the error of compression."""

from gradwire.feedback.common_momentum import CommonMomentum as CommonMomentum
from gradwire.feedback.decoupled_momentum import DecoupledMomentum as DecoupledMomentum
from gradwire.feedback.ef21 import EF21 as EF21
from gradwire.feedback.ef21_momentum import EF21Momentum as EF21Momentum
from gradwire.feedback.feedback import Feedback as Feedback
from gradwire.feedback.momentum_correction import MomentumCorrection as MomentumCorrection
from gradwire.feedback.none import NoFeedback as NoFeedback
from gradwire.feedback.preconditioned_momentum import PreconditionedMomentum as PreconditionedMomentum
from gradwire.feedback.residual import Residual as Residual
