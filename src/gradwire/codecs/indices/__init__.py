"""Index coders: how the positions of sent values become bytes."""

from gradwire.codecs.indices.bitmap import Bitmap
from gradwire.codecs.indices.gap16 import Gap16
from gradwire.codecs.indices.plain import Int32, Int64
from gradwire.codecs.indices.rice import Rice
from gradwire.codecs.indices.rows import Rows

__all__ = ["Bitmap", "Gap16", "Int32", "Int64", "Rice", "Rows"]
