"""Tensors to few bytes, and back."""

from gradwire.codecs import indices, quantizers, selectors, transforms
from gradwire.codecs.codec import Codec, codec
from gradwire.codecs.indices import *  # noqa: F403
from gradwire.codecs.quantizers import *  # noqa: F403
from gradwire.codecs.selectors import *  # noqa: F403
from gradwire.codecs.transforms import *  # noqa: F403

__all__ = ["Codec", "codec"]
__all__ += selectors.__all__
__all__ += quantizers.__all__
__all__ += indices.__all__
__all__ += transforms.__all__
