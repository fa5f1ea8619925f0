"""What happens to the error of compression."""

from gradwire.feedback.ef21 import EF21
from gradwire.feedback.feedback import Feedback
from gradwire.feedback.momentum_correction import MomentumCorrection
from gradwire.feedback.none import NoFeedback
from gradwire.feedback.residual import Residual

__all__ = ["EF21", "Feedback", "MomentumCorrection", "NoFeedback", "Residual"]
