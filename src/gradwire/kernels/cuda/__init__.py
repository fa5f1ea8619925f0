"""Triton versions of the kernels, by the names and signatures of their definitions."""

# ruff: noqa: F401 - what is imported here is what `dispatch.faster` offers

from gradwire.kernels.cuda.accumulate import accumulate_, finite_or_zero, subtract_sent_
from gradwire.kernels.cuda.apply_momentum import apply_momentum_
from gradwire.kernels.cuda.block_decode import sign_decode_times_
from gradwire.kernels.cuda.block_merge import merge_sign
from gradwire.kernels.cuda.block_signs import momentum_sign_
from gradwire.kernels.cuda.casts import cast_decode, cast_encode, feedback_sum_
from gradwire.kernels.cuda.chunks import chunk_topk
from gradwire.kernels.cuda.conditional import copy_if_, zero_if_
from gradwire.kernels.cuda.draw import permute, scattered
from gradwire.kernels.cuda.merge import merge_integer
from gradwire.kernels.cuda.momentum import next_momentum_
from gradwire.kernels.cuda.quantize import (
    feedback_integer_,
    integer_decode,
    integer_encode,
    natural_decode,
    natural_encode,
    qsgd_decode,
    qsgd_encode,
    ternary_decode,
    ternary_encode,
)
from gradwire.kernels.cuda.rice_reader import decode_blocks, rice_decode
from gradwire.kernels.cuda.rice_writer import encode_blocks, rice_encode
from gradwire.kernels.cuda.scatter import scatter_mean, scatter_mean_, scatter_product_
from gradwire.kernels.cuda.sign import feedback_sign_, onebit_decode, onebit_encode, sign_decode, sign_encode
from gradwire.kernels.cuda.topk import carry_topk_, momentum_topk_, topk
