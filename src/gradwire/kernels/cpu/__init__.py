"""Kernels for the CPU, compiled by Numba."""

# ruff: noqa: F401 - what is imported here is what `dispatch.faster` offers

from gradwire.kernels.cpu.casts import cast_decode, cast_encode
from gradwire.kernels.cpu.chunks import chunk_topk
from gradwire.kernels.cpu.draw import permute
from gradwire.kernels.cpu.feedback import accumulate_, feedback_integer_, feedback_sign_
from gradwire.kernels.cpu.merge import merge_integer, merge_sign
from gradwire.kernels.cpu.momentum import next_momentum_
from gradwire.kernels.cpu.places import places
from gradwire.kernels.cpu.quantize import (
    integer_decode,
    integer_encode,
    natural_decode,
    natural_encode,
    qsgd_decode,
    qsgd_encode,
    ternary_decode,
    ternary_encode,
)
from gradwire.kernels.cpu.rice import decode_blocks, encode_blocks
from gradwire.kernels.cpu.rows import decode_in_rows, encode_in_rows
from gradwire.kernels.cpu.scatter import scatter_mean, scatter_mean_
from gradwire.kernels.cpu.select import carry_topk_, subtract_sent_, topk
from gradwire.kernels.cpu.signs import onebit_decode, onebit_encode, sign_decode, sign_encode
