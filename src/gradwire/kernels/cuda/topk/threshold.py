"""Find each segment's last winner, and where each chunk's winners go.

Most candidates lie in bins that win or lose as a whole; programs count those, and put the rest aside once more. Where
the rest would be many, because magnitudes crowd together, `narrow` first cuts its bin into finer ones. The program that
arrives last in a segment searches the rest. Where all that is not zero is too little, zeros win, too. Where there were
too few candidates otherwise, or too many, it guesses the last winner's key for `radix` to prove.
"""

import triton
import triton.language as tl

from gradwire.kernels.cuda.topk.binary_search import WIDTH, search, search_loaded, wins
from gradwire.kernels.cuda.topk.compact import cut_bins, fine_bin, first_row
from gradwire.kernels.cuda.topk.mark import NEVER, key_of
from gradwire.kernels.cuda.topk.radix_fallback import share_out
from gradwire.kernels.cuda.topk.sample import is_last
from gradwire.kernels.cuda.topk.workspace import (
    ABOVE,
    APART,
    BITS,
    BOUND,
    CHUNK,
    CHUNKS,
    COLUMNS,
    COUNT,
    CUT,
    EXACT,
    FINE_BINS,
    FOUND,
    KEY,
    LAST,
    LENGTH,
    LOW,
    MISSED,
    OUT,
    OUTCOME,
    OVER,
    ROOM,
    ROW,
    ROWS,
    SLOT,
    START,
    TOP,
    WITHIN,
    ZEROS,
)

WIDE = tl.constexpr(512)  # candidates of a chunk that are looked at together
_CROWD = tl.constexpr(16384)  # candidates that one program may search,
_SHARE = tl.constexpr(8192)  # and one more for so many entries
_FEW = tl.constexpr(1024)  # candidates of a bin that are searched as they are
_FINER = tl.constexpr(10)  # bits by which bins are finer the second time: as many as a bin's number has


@triton.jit
def bins_of(line):
    """Where bins begin, the bits of a key below its bin, the bin that holds the last winner, and the highest bin."""
    return (
        tl.load(line + LOW).to(tl.int32),
        tl.load(line + BITS).to(tl.int32),
        tl.load(line + CUT).to(tl.int32),
        tl.load(line + TOP).to(tl.int32),
    )


@triton.jit
def narrow(table, chunk_segment, state, fine, base, count, kept):
    """Count the candidates of the bin that holds the last winner in finer bins, where they are many."""
    chunk = tl.program_id(0)
    segment = tl.load(chunk_segment + chunk)
    entry, line = table + segment * COLUMNS, state + segment * COLUMNS
    found, need = tl.load(line + FOUND), tl.load(entry + COUNT) - tl.load(line + OVER)
    usable = (found >= need) & (need > 0) & (found <= tl.load(entry + ROOM))
    if usable & (tl.load(line + WITHIN) > _FEW):
        low, bits, cut, top = bins_of(line)
        fine += segment * FINE_BINS * APART
        begin, finer = low + (cut << bits), tl.where(cut == top, bits, tl.maximum(bits - _FINER, 0))
        number = tl.load(count + chunk)
        kept += tl.load(entry + SLOT) + tl.load(base + chunk)
        for j in range(0, number, WIDE):
            at = j + tl.arange(0, WIDE)
            key = tl.load(kept + at, mask=at < number, other=0) & NEVER
            inside = (at < number) & (fine_bin(key, low, bits, top) == cut)
            bin = fine_bin(tl.where(inside, key, begin), begin, finer, FINE_BINS - 1)
            tl.atomic_add(fine + bin * APART, 1, mask=inside, sem="relaxed")
        if is_last(line, tl.load(entry + CHUNKS)):
            cut_bins(line, fine, need, tl.load(line + ABOVE), FINE_BINS)
            tl.store(line + LOW, begin.to(tl.int64))
            tl.store(line + BITS, finer.to(tl.int64))
            tl.store(line + TOP, tl.where(cut == top, FINE_BINS - 1, FINE_BINS).to(tl.int64))


@triton.jit
def _count_winners(chunk, entry, line, low, bits, cut, top, base, count, kept, places, bound_keys, bound_places, sure):
    """Add a chunk's sure winners to those above the range; put candidates in the cut bin aside."""
    slot, number = tl.load(entry + SLOT), tl.load(count + chunk)
    kept += slot + tl.load(base + chunk)
    places += slot + tl.load(base + chunk)
    winners = tl.zeros([WIDE], tl.int32)
    for j in range(0, number, WIDE):
        at = j + tl.arange(0, WIDE)
        live = at < number
        key = tl.load(kept + at, mask=live, other=0) & NEVER
        bin = fine_bin(key, low, bits, top)
        winners += (live & (bin > cut)).to(tl.int32)
        unsure = live & (bin == cut)
        several = tl.sum(unsure.to(tl.int32), 0)
        if several > 0:
            to = tl.atomic_add(line + BOUND, several.to(tl.int64), sem="relaxed") + slot
            to += tl.cumsum(unsure.to(tl.int32), 0) - 1
            tl.store(bound_keys + to, key, mask=unsure)
            tl.store(bound_places + to, tl.load(places + at, mask=unsure), mask=unsure)
    tl.store(sure + chunk, tl.load(sure + chunk) + tl.sum(winners, 0))


@triton.jit
def _decide(entry, line, low, bits, cut, top, need, keys, places, sure, out, BLOCK: tl.constexpr):
    """Search the cut bin, and add its winners to their chunks'; then sum up."""
    start, length, count = tl.load(entry + START), tl.load(entry + LENGTH), tl.load(line + BOUND).to(tl.int32)
    keys += tl.load(entry + SLOT)
    places += tl.load(entry + SLOT)
    end = low + (tl.minimum(cut + 1, top).to(tl.int64) << bits)  # a bin may end above all keys
    high = tl.where(cut == top, NEVER, tl.minimum(end - 1, NEVER)).to(tl.int32)
    key, last = search(keys, places, count, need - tl.load(line + ABOVE), low + (cut << bits), high, length)
    tl.store(line + KEY, key.to(tl.int64))
    tl.store(line + LAST, last)
    first, chunks = tl.load(entry + CHUNK), tl.load(entry + CHUNKS).to(tl.int32)
    for i in range(0, count, WIDTH):
        at = i + tl.arange(0, WIDTH)
        live = at < count
        place = tl.load(places + at, mask=live, other=0).to(tl.int64)
        won = live & wins(tl.load(keys + at, mask=live, other=-1), place, key, last)
        chunk = first + ((start + place) // BLOCK - start // BLOCK) // ROWS
        tl.atomic_add(sure + chunk, 1, mask=won)
    tl.debug_barrier()
    to = tl.load(entry + OUT)
    for i in range(0, chunks, WIDTH):
        at = i + tl.arange(0, WIDTH)
        number = tl.load(sure + first + at, mask=at < chunks, other=0, volatile=True)
        tl.store(out + first + at, to + tl.cumsum(number, 0) - number, mask=at < chunks)
        to += tl.sum(number, 0)


@triton.jit
def _count_zeros(chunk, entry, count, sure, BLOCK: tl.constexpr):
    """Count a chunk's entries that are not zero, the candidates and what lies above them; then its zeros."""
    row, end = first_row(chunk, entry)
    begin = (row - tl.load(entry + ROW)) * BLOCK - tl.load(entry + START) % BLOCK  # it may begin before the segment
    size = tl.minimum(begin + (end - row) * BLOCK, tl.load(entry + LENGTH)) - tl.maximum(begin, 0)
    others = tl.load(count + chunk) + tl.load(sure + chunk)
    tl.debug_barrier()
    tl.store(count + chunk, others)
    tl.store(sure + chunk, size.to(tl.int32) - others)


@triton.jit
def _admit_zeros(entry, line, left, count, sure, out):
    """All others win, and the first zeros with them."""
    first, chunks = tl.load(entry + CHUNK), tl.load(entry + CHUNKS).to(tl.int32)
    share_out(count + first, sure + first, out + first, chunks, tl.load(entry + OUT), left)
    tl.store(line + KEY, tl.zeros([], tl.int64))


@triton.jit
def _guess(x, entry, line):
    """The last winner's key among a few entries: the very one where very many are equal."""
    length = tl.load(entry + LENGTH)
    at = tl.arange(0, WIDTH) * length // WIDTH
    key = key_of(tl.load(x + tl.load(entry + START) + at).to(tl.float32))
    due = tl.maximum((tl.load(entry + COUNT) * WIDTH // length).to(tl.int32), 1)
    lowest = tl.zeros([], tl.int32)
    tl.store(line + KEY, search_loaded(key, due, lowest, lowest + NEVER).to(tl.int64))


@triton.jit
def threshold(
    x, table, chunk_segment, state, base, count, kept, places, bound_keys, bound_places, sure, out, flags,
    BLOCK: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    segment = tl.load(chunk_segment + chunk)
    entry, line = table + segment * COLUMNS, state + segment * COLUMNS
    low, bits, cut, top = bins_of(line)
    found, need = tl.load(line + FOUND), tl.load(entry + COUNT) - tl.load(line + OVER)
    few, crowd = found < need, tl.load(line + WITHIN) > tl.load(entry + LENGTH) // _SHARE + _CROWD
    zeros = few & (low == 1) & (need > 0)
    missed = (few & (low != 1)) | (need <= 0) | (found > tl.load(entry + ROOM)) | (crowd & ~few)
    if zeros:
        _count_zeros(chunk, entry, count, sure, BLOCK)
    elif not missed:
        _count_winners(
            chunk, entry, line, low, bits, cut, top, base, count, kept, places, bound_keys, bound_places, sure
        )
    if is_last(line, tl.load(entry + CHUNKS)):
        if zeros:
            _admit_zeros(entry, line, need - found, count, sure, out)
        elif missed:
            _guess(x, entry, line)
            tl.store(flags + 1, 1)
        else:
            _decide(entry, line, low, bits, cut, top, need, bound_keys, bound_places, sure, out, BLOCK)
        tl.debug_barrier()
        tl.store(line + OUTCOME, tl.where(zeros, ZEROS, tl.where(missed, MISSED, EXACT)))
        tl.store(line + FOUND, 0)
        tl.store(line + OVER, 0)
        tl.store(line + BOUND, 0)
