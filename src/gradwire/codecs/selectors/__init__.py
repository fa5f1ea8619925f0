"""Selectors: which positions are sent."""

from gradwire.codecs.selectors.adacomp import AdaComp as AdaComp
from gradwire.codecs.selectors.chunk_topk import ChunkTopK as ChunkTopK
from gradwire.codecs.selectors.randomk import RandomK as RandomK
from gradwire.codecs.selectors.sampled_topk import SampledTopK as SampledTopK
from gradwire.codecs.selectors.threshold import AdaptiveThreshold as AdaptiveThreshold
from gradwire.codecs.selectors.threshold import Threshold as Threshold
from gradwire.codecs.selectors.topk import TopK as TopK
from gradwire.codecs.selectors.variance import Variance as Variance
