"""Kernels for the CPU, compiled by Numba."""

from gradwire.kernels.cpu.feedback import accumulate_, feedback_integer_, feedback_sign_
from gradwire.kernels.cpu.quantize import (
    integer_decode,
    integer_encode,
    natural_decode,
    natural_encode,
    onebit_decode,
    onebit_encode,
    qsgd_decode,
    qsgd_encode,
    sign_decode,
    sign_encode,
    ternary_decode,
    ternary_encode,
)
from gradwire.kernels.cpu.select import accumulate_topk_, settle_, topk

__all__ = [
    "accumulate_",
    "accumulate_topk_",
    "feedback_integer_",
    "feedback_sign_",
    "integer_decode",
    "integer_encode",
    "natural_decode",
    "natural_encode",
    "onebit_decode",
    "onebit_encode",
    "qsgd_decode",
    "qsgd_encode",
    "settle_",
    "sign_decode",
    "sign_encode",
    "ternary_decode",
    "ternary_encode",
    "topk",
]
