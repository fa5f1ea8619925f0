"""Traits: what a codec promises. Each promise is a law, tested for every registered codec."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Traits:
    """What may be relied upon.

    Attributes:
        linear: The mean of encodings decodes to the mean, up to rounding: payloads may be added.
        unbiased: The expectation over random bits of what is decoded is what was encoded.
        contraction: The error is never larger than what was encoded: |x - C(x)|^2 <= |x|^2, in expectation over the
            random bits where there are any, and strictly smaller unless x = 0.
        lossless: What is decoded is what was encoded, bit for bit, for float32.
        fixed: The length of a message is known from the segment table alone.
    """

    linear: bool = False
    unbiased: bool = False
    contraction: bool = False
    lossless: bool = False
    fixed: bool = True

    def __str__(self) -> str:
        held = [name for name in self.__dataclass_fields__ if getattr(self, name)]
        return ", ".join(held) or "none"
