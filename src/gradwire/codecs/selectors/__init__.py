"""Selectors: which positions are sent."""

from gradwire.codecs.selectors.adacomp import AdaComp
from gradwire.codecs.selectors.chunk_topk import ChunkTopK
from gradwire.codecs.selectors.randomk import RandomK
from gradwire.codecs.selectors.sampled_topk import SampledTopK
from gradwire.codecs.selectors.threshold import AdaptiveThreshold, Threshold
from gradwire.codecs.selectors.topk import TopK
from gradwire.codecs.selectors.variance import Variance

__all__ = [
    "AdaComp",
    "AdaptiveThreshold",
    "ChunkTopK",
    "RandomK",
    "SampledTopK",
    "Threshold",
    "TopK",
    "Variance",
]
