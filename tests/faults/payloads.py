"""Mutated payloads: every chain of stages decodes or refuses them, the same by compiled kernels and by definitions.

Payloads lie at the end of a page, and the page after it cannot be read: a kernel that reads beyond its message dies of
it. With NUMBA_BOUNDSCHECK=1 in the environment, Numba checks every index too.
"""

import ctypes
import mmap
import random
import traceback
from collections.abc import Iterator

import torch
from torch import Tensor

from faults.campaign import Campaign
from gradwire.codecs.codec import Codec
from gradwire.core.keys import Key
from gradwire.core.payload import CorruptMessageError, Payload
from gradwire.core.segments import Segments
from gradwire.kernels.dispatch import reference_only
from strategies import CODECS, KINDS, signal, table

LENGTHS = ((1,), (7,), (8, 9), (9, 300, 1), (64,), (1000,), (3, 0, 40, 5), (257, 255))
WORDS = (0, 1, 2**7, 2**8 - 1, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1)


class GuardedPages:
    """Room for bytes that end where the process may not read on."""

    def __init__(self, most: int = 2**16) -> None:
        self._room = mmap.mmap(-1, most + mmap.PAGESIZE)
        self._most = most
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._room))
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mprotect(ctypes.c_void_p(start + most), mmap.PAGESIZE, 0):
            raise OSError(ctypes.get_errno(), "mprotect")

    def put(self, data: bytes) -> Tensor:
        if not data:
            return torch.zeros(0, dtype=torch.uint8)
        at = self._most - len(data)
        self._room[at : self._most] = data
        return torch.frombuffer(memoryview(self._room)[at : self._most], dtype=torch.uint8)


def flip_bits(data: bytearray, draw: random.Random) -> None:
    for _ in range(draw.choice((1, 1, 2, 8))):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)


def set_bytes(data: bytearray, draw: random.Random) -> None:
    for _ in range(draw.choice((1, 1, 3))):
        data[draw.randrange(len(data))] = draw.choice((0, 1, 127, 128, 254, 255, draw.randrange(256)))


def set_word(data: bytearray, draw: random.Random) -> None:
    at, width = draw.randrange(len(data)), draw.choice((2, 4, 8))
    word = (draw.choice(WORDS) % 2 ** (8 * width)).to_bytes(width, "little")[: len(data) - at]
    data[at : at + len(word)] = word


def set_head(data: bytearray, draw: random.Random) -> None:
    for at in range(min(len(data), draw.choice((1, 4, 8, 12)))):
        data[at] = draw.choice((0, 1, 255, draw.randrange(256)))


def set_tail(data: bytearray, draw: random.Random) -> None:
    for at in range(min(len(data), draw.choice((1, 2, 4, 9)))):
        data[-1 - at] = draw.choice((0, 255, draw.randrange(256)))


def swap_parts(data: bytearray, draw: random.Random) -> None:
    one, other = sorted((draw.randrange(len(data)), draw.randrange(len(data))))
    n = min(draw.choice((1, 2, 4, 16)), other - one, len(data) - other)
    data[one : one + n], data[other : other + n] = data[other : other + n], data[one : one + n]


def make_noise(data: bytearray, draw: random.Random) -> None:
    data[:] = draw.randbytes(len(data))


def cut(data: bytearray, draw: random.Random) -> None:
    del data[draw.randrange(len(data)) :]


def grow(data: bytearray, draw: random.Random) -> None:
    data += draw.randbytes(draw.choice((1, 2, 5, 64)))


def insert(data: bytearray, draw: random.Random) -> None:
    at = draw.randrange(len(data) + 1)
    data[at:at] = draw.randbytes(draw.choice((1, 3, 4)))


def remove(data: bytearray, draw: random.Random) -> None:
    at = draw.randrange(len(data))
    del data[at : at + draw.choice((1, 3, 4))]


def repeat(data: bytearray, draw: random.Random) -> None:
    at = draw.randrange(len(data))
    data[at:at] = data[at : at + draw.choice((1, 4, 32))]


MUTATIONS = {
    "bits flipped": flip_bits,
    "bytes set": set_bytes,
    "a word at its limits": set_word,
    "a damaged head": set_head,
    "a damaged tail": set_tail,
    "parts exchanged": swap_parts,
    "noise": make_noise,
    "cut short": cut,
    "made longer": grow,
    "bytes inserted": insert,
    "bytes removed": remove,
    "bytes repeated": repeat,
}


def messages(campaign: Campaign) -> Iterator[tuple[Codec, Segments, Key, bytes]]:
    """Right messages: every chain in turn, of tensors of all kinds and lengths."""
    draw, chains = campaign.random, list(CODECS.values())
    while True:
        draw.shuffle(chains)
        for chain in chains:
            segments = table(*draw.choice(LENGTHS))
            key = Key(seed=draw.randrange(2**31), step=draw.randrange(100), rank=draw.randrange(4))
            data = chain.encode(signal(segments, draw.choice(KINDS), draw.randrange(2**31)), key).payload.data
            yield chain, segments, key, bytes(data.tolist())


def decoded(chain: Codec, data: Tensor, segments: Segments, key: Key) -> Tensor | None:
    """The values; None where the message is refused."""
    try:
        return chain.decode(Payload(data), segments, key)
    except CorruptMessageError:
        return None


def alike(one: Tensor | None, other: Tensor | None) -> bool:
    """Bit for bit, where both are finite; what a damaged scale makes infinite need not have one sign of NaN."""
    if one is None or other is None:
        return one is other
    return bool(((one == other) | ~(one.isfinite() & other.isfinite())).all())


def run(campaign: Campaign) -> None:
    """Mutate and decode; every eighth message also by definitions, and compare."""
    torch.set_num_threads(1)
    draw, pages, kinds = campaign.random, GuardedPages(), list(MUTATIONS)
    refused = compared = 0
    for chain, segments, key, whole in messages(campaign):
        if not campaign.going():
            break
        # The inverse of a transform takes most of the time, and reads no byte of the message.
        for number in range(80 if chain.transform is None else 8):
            kind = draw.choice(kinds)
            changed = bytearray(whole)
            if changed or kind in ("made longer", "bytes inserted"):
                MUTATIONS[kind](changed, draw)
            campaign.made(kind)
            both = number % 8 == 0
            wrong, was_refused = check(chain, segments, key, pages.put(bytes(changed)), both)
            refused, compared = refused + was_refused, compared + both
            if wrong:
                failure = "traceback" if "Traceback" in wrong else "wrong result"
                campaign.fail(failure, f"{chain} of {segments.lengths}, {kind}, {key}, {changed.hex()[:500]}: {wrong}")
    campaign.facts = {"refused": refused, "compared with definitions": compared, "chains": len(CODECS)}


def check(chain: Codec, segments: Segments, key: Key, data: Tensor, both: bool) -> tuple[str, bool]:
    """Decode one message, in both ways if wanted; what is wrong, and whether it was refused."""
    try:
        fast = decoded(chain, data, segments, key)
        if both:
            with reference_only():
                slow = decoded(chain, data, segments, key)
    except Exception:
        return traceback.format_exc(limit=-3), False
    if both and not alike(fast, slow):
        return "kernels and definitions differ", fast is None
    if fast is not None and (fast.shape != (segments.total,) or fast.dtype != torch.float32):
        return "another shape or format", False
    return "", fast is None
