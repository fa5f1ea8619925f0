"""Learning rate scaling: how much larger than one worker's the learning rate may be, by one rule for all graphs.

A step of gossip averages the steps of a rank and its neighbors, so by the rule of linear scaling the rate grows with
their number: 1 + the mean degree. It is the same number on all ranks, also where some have more neighbors. On the
complete graph it is the number of ranks, as for all-reduce SGD. Warm it up over the first epochs.
"""

from gradwire.topology import Topology


def rate_scale(topology: Topology) -> float:
    """1 + the mean number of in-neighbors in a step."""
    degrees = [len(topology.peers(rank, step)) for step in range(topology.period) for rank in range(topology.size)]
    return 1.0 + sum(degrees) / len(degrees)
