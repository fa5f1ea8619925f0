"""Exact top-k, with or without error feedback: one pass over all memory and a few short launches.

1. `sample` and `refine`: a sample of the target says in which range of keys each segment's last winner lies. A key is
   the bits of a magnitude, which order as magnitudes do.
2. `mark`: the pass over memory. It accumulates the gradient, or the momentum that this makes, and sets candidates,
   the entries in that range, aside in slots of the slab where they lie.
3. `compact`: candidates are brought together, chunk by chunk, and counted in bins.
4. `narrow` and `threshold`: the last winner is searched among the few candidates of one bin (`binary_search`). Where
   they are many, the bin is cut into finer ones first.
5. `radix_fallback`: six launches that pass over every segment, unless its range held too few or too many, or very many
   are equal. Then all programs read it again: once if a guess is right, six times at most.
6. `write`: the winners, in the order of their places; what is sent as it is is taken off the memories.

A segment has a program for each chunk of 65,536 entries, and no program ever works on more than one chunk and a bounded
number of candidates, so that the time hardly depends on the values. Nothing waits for the device, and shapes are known
beforehand, so all of it can be captured in a graph. `workspace` holds the tables and the memory; `selection` launches.
"""

from gradwire.kernels.cuda.topk.selection import carry_topk_, momentum_topk_, topk

__all__ = ["carry_topk_", "momentum_topk_", "topk"]
