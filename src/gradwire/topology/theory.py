"""What theorems promise of gossip on a graph, plain or compressed.

Paper:    Koloskova, Stich, Jaggi, "Decentralized stochastic optimization and gossip algorithms with compressed
          communication", ICML 2019. https://arxiv.org/abs/1902.00340, Theorem 2
Formula:  gamma* = rho^2 delta / (16 rho + rho^2 + 4 beta^2 + 2 rho beta^2 - 8 rho delta)
          factor = 1 - rho^2 delta / 82
Wire:     nothing
Traits:   delta is the codec's: E |x - C(x)|^2 <= (1 - delta) |x|^2. Where W is symmetric and static, each round with
          gamma* multiplies the sum over ranks of |x_i - mean|^2 + |x_i - xhat_i|^2 by the factor at most
Differs:  the paper calls rho delta, and delta omega
Spec:     none: these are functions of a topology
"""

import math

from gradwire.topology.topology import Topology


def consensus_step(topology: Topology, delta: float) -> float:
    """CHOCO's gamma*: proven to converge, and far smaller than what works best."""
    _require_theorem(topology, delta)
    rho, beta = topology.rho, topology.beta
    return rho**2 * delta / (16 * rho + rho**2 + 4 * beta**2 + 2 * rho * beta**2 - 8 * rho * delta)


def consensus_factor(topology: Topology, delta: float) -> float:
    """By what CHOCO-Gossip with gamma* multiplies the squared error in a round, at most."""
    _require_theorem(topology, delta)
    return 1.0 - topology.rho**2 * delta / 82.0


def rounds_to_halve(topology: Topology) -> int:
    """After how many rounds of plain gossip disagreement is halved, in the long run."""
    if topology.size == 1:
        return 0
    if topology.rho > 1.0 - 1e-12:
        return topology.period
    return max(1, math.ceil(math.log(0.5) / math.log1p(-topology.rho) - 1e-9))


def _require_theorem(topology: Topology, delta: float) -> None:
    if topology.period > 1 or not topology.symmetric:
        what = "changes from step to step" if topology.period > 1 else "is not symmetric"
        raise ValueError(f"{topology} {what}, and the theorem is for static symmetric weights; choose gamma yourself")
    if not 0.0 < delta <= 1.0:
        raise ValueError(f"delta={delta} is no contraction; write a number in (0, 1], 1 where nothing is lost")
