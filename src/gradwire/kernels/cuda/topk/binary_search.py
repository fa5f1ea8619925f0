"""Find the last winner among keys: by halving, since one program must do it and ties are decided by place."""

import triton
import triton.language as tl

WIDTH = tl.constexpr(2048)  # keys that are looked at together


@triton.jit
def _reaching(keys, count, key):
    """How many have at least this key."""
    found = tl.zeros([WIDTH], tl.int64)
    for i in range(0, count, WIDTH):
        at = i + tl.arange(0, WIDTH)
        found += (tl.load(keys + at, mask=at < count, other=-1) >= key).to(tl.int64)
    return tl.sum(found, 0)


@triton.jit
def _tied(keys, places, count, key, last):
    """How many have exactly this key, at places up to ``last``."""
    found = tl.zeros([WIDTH], tl.int64)
    for i in range(0, count, WIDTH):
        at = i + tl.arange(0, WIDTH)
        hit = tl.load(keys + at, mask=at < count, other=-1) == key
        found += (hit & (tl.load(places + at, mask=at < count, other=0) <= last)).to(tl.int64)
    return tl.sum(found, 0)


@triton.jit
def _last_tied(keys, places, count, key, left, length):
    """The place up to which there are ``left`` of this key."""
    low = tl.zeros([], tl.int64)
    high = low + length - 1
    while low < high:
        middle = (low + high) // 2
        if _tied(keys, places, count, key, middle) >= left:
            high = middle
        else:
            low = middle + 1
    return low


@triton.jit
def search_loaded(keys, wanted, low, high):
    """The key that ``wanted`` of these keys, which are in registers, reach. low <= it <= high."""
    while low < high:  # two are counted in one number, so that the range is cut into three
        step = (high - low) // 3 + 1
        first = low + step
        second = high - tl.maximum(high - first - step, 0)
        both = tl.sum((keys >= first).to(tl.int32) + ((keys >= second).to(tl.int32) << 16), 0)
        if (both >> 16) >= wanted:
            low = second
        elif (both & 0xFFFF) >= wanted:
            low, high = first, second - 1
        else:
            high = first - 1
    return low


@triton.jit
def search(keys, places, count, wanted, low, high, length):
    """The key and place of the last of ``wanted`` winners; of equals the first win. low <= its key <= high."""
    if count <= WIDTH:
        at = tl.arange(0, WIDTH)
        low = search_loaded(tl.load(keys + at, mask=at < count, other=-1), wanted, low, high)
    else:
        while low < high:
            middle = high - (high - low) // 2
            if _reaching(keys, count, middle) >= wanted:
                low = middle
            else:
                high = middle - 1
    over = _reaching(keys, count, low + 1)
    last = tl.zeros([], tl.int64) + length
    if _tied(keys, places, count, low, length) > wanted - over:
        last = _last_tied(keys, places, count, low, wanted - over, length)
    return low, last


@triton.jit
def wins(key, place, low, last):
    return (key > low) | ((key == low) & (place <= last))
