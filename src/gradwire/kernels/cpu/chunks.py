"""The largest entries of every chunk, chunk by chunk."""

import numpy as np
import torch
from numba import prange
from torch import Tensor

from gradwire.kernels.chunks import chunks
from gradwire.kernels.cpu.candidates import MAGNITUDE, kth
from gradwire.kernels.cpu.threads import compiled, in_turn, serial

_FEW = 32  # winners that are kept at hand
_SHORT = 512  # up to this, counting digits takes longer than it saves


@serial
def _weakest(bits, places):
    """Which of these places has the smallest magnitude; of equals the last."""
    found = 0
    for i in range(places.size):
        if bits[places[i]] & MAGNITUDE <= bits[places[found]] & MAGNITUDE:
            found = i
    return found


@serial
def _keep_few(bits, places):
    """The largest so far, place after place: what is larger than the weakest takes its turn."""
    k = places.size
    for i in range(k):
        places[i] = i
    weak = _weakest(bits, places)
    edge = bits[places[weak]] & MAGNITUDE
    for j in range(k, bits.size):
        if bits[j] & MAGNITUDE > edge:
            for i in range(weak, k - 1):
                places[i] = places[i + 1]
            places[k - 1] = j
            weak = _weakest(bits, places)
            edge = bits[places[weak]] & MAGNITUDE


@serial
def _keep_many(bits, places):
    k = places.size
    edge = np.partition(bits & MAGNITUDE, bits.size - k)[bits.size - k] if bits.size <= _SHORT else kth(bits, k)
    ties = k
    for j in range(bits.size):
        ties -= bits[j] & MAGNITUDE > edge
    at = 0
    for j in range(bits.size):
        size = bits[j] & MAGNITUDE
        if size > edge or (size == edge and ties > 0):
            ties -= size == edge
            places[at] = j
            at += 1


@compiled
def _choose(bits, start, length, first, out, end, count, k, chunk, indices):
    for c in prange(count):
        s = np.searchsorted(end, c, side="right")
        i = c - first[s]
        begin, size = start[s] + i * chunk, min(chunk, length[s] - i * chunk)
        kept, at = min(k, size), out[s] + i * k
        places = indices[at : at + kept]
        if kept <= _FEW:
            _keep_few(bits[begin : begin + size], places)
        else:
            _keep_many(bits[begin : begin + size], places)
        places += begin


@in_turn
def chunk_topk(x: Tensor, lengths: tuple[int, ...], k: int, chunk: int) -> Tensor:
    where = chunks(lengths, k, chunk)
    indices = torch.empty(where.total, dtype=torch.int64)
    bits = x.detach().float().contiguous().numpy().view(np.int32)
    tables = [table.numpy() for table in where[:5]]
    _choose(bits, *tables, where.chunks, k, chunk, indices.numpy())
    return indices
