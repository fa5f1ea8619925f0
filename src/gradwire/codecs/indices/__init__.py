"""Index coders: how the positions of sent values become bytes."""

from gradwire.codecs.indices.bitmap import Bitmap as Bitmap
from gradwire.codecs.indices.gap16 import Gap16 as Gap16
from gradwire.codecs.indices.plain import Int32 as Int32
from gradwire.codecs.indices.plain import Int64 as Int64
from gradwire.codecs.indices.rice import Rice as Rice
from gradwire.codecs.indices.rows import Rows as Rows
