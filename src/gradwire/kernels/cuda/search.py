"""Find the last winner among keys: by halving, since one program must do it and ties are decided by place."""

import triton
import triton.language as tl

from gradwire.kernels.cuda.sweep import key_of

WIDTH = tl.constexpr(2048)  # keys that are looked at together
TOP = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _load_key(keys, at, live, RAW: tl.constexpr):
    if RAW:
        key = key_of(tl.load(keys + at, mask=live, other=0.0).to(tl.float32))
    else:
        key = tl.load(keys + at, mask=live, other=-1)
    return tl.where(live, key, -1)


@triton.jit
def reaching(keys, count, key, RAW: tl.constexpr):
    """How many have at least this key. RAW: they are still floats."""
    found = tl.zeros([WIDTH], tl.int64)
    for i in range(0, count, WIDTH):
        at = i + tl.arange(0, WIDTH)
        found += (_load_key(keys, at, at < count, RAW) >= key).to(tl.int64)
    return tl.sum(found, 0)


@triton.jit
def tied(keys, places, count, key, last, RAW: tl.constexpr):
    """How many have exactly this key, at places up to ``last``. RAW: the place is the position."""
    found = tl.zeros([WIDTH], tl.int64)
    for i in range(0, count, WIDTH):
        at = i + tl.arange(0, WIDTH)
        hit = _load_key(keys, at, at < count, RAW) == key
        place = at if RAW else tl.load(places + at, mask=at < count, other=0)
        found += (hit & (place <= last)).to(tl.int64)
    return tl.sum(found, 0)


@triton.jit
def last_tied(keys, places, count, key, left, length, RAW: tl.constexpr):
    """The place up to which there are ``left`` of this key."""
    low = tl.zeros([], tl.int64)
    high = low + length - 1
    while low < high:
        middle = (low + high) // 2
        if tied(keys, places, count, key, middle, RAW) >= left:
            high = middle
        else:
            low = middle + 1
    return low


@triton.jit
def search(keys, places, count, wanted, low, high, length, RAW: tl.constexpr):
    """The key and place of the last of ``wanted`` winners; of equals the first win. low <= its key <= high."""
    while low < high:
        middle = high - (high - low) // 2
        if reaching(keys, count, middle, RAW) >= wanted:
            low = middle
        else:
            high = middle - 1
    over = reaching(keys, count, low + 1, RAW)
    last = tl.zeros([], tl.int64) + length
    if tied(keys, places, count, low, length, RAW) > wanted - over:
        last = last_tied(keys, places, count, low, wanted - over, length, RAW)
    return low, last


@triton.jit
def wins(key, place, low, last):
    return (key > low) | ((key == low) & (place <= last))
