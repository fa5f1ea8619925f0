"""Optimal gamma: the consensus step that keeps replicas closest while noise keeps driving them apart.

Paper:    none; the second moments of CHOCO-Gossip (Koloskova et al., ICML 2019. https://arxiv.org/abs/1902.00340), with
          a codec modeled by the two numbers that its messages show
Formula:  along an eigenvector of W with eigenvalue 1 - mu, and per step of unit noise e:
              x = x + e;  d = x - xhat;  xhat = xhat + gain d + n;  x = x - gamma mu xhat;  E n^2 = noise E d^2
          gain = <q, d> / |d|^2;  noise = |q|^2 / |d|^2 - gain^2;  q = C(d)
          gamma = the one of a fixed grid in (0, 1] with the least stationary sum over mu > 0 of E x^2, to which a
          steady push of h per step adds (h / (gamma mu))^2
Wire:     nothing
Traits:   noise of quantizers is independent between ranks and spreads over all eigenvectors; selectors leave out much
          the same entries on all ranks, so that their noise may stay in each: there the mean of both cases is used
Differs:  no paper; this is our own heuristic
Spec:     none: a function of a topology and two measured numbers
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.topology import Topology

PUSH = 0.1  # h: data that differ between ranks, and momentum, push the same way for many steps
GRID: tuple[float, ...] = tuple(2.0 ** (-k / 8) for k in range(112))  # 1 down to 6.6e-5; a step of 9 percent


class Fidelity(NamedTuple):
    """What a codec does to vectors, on average.

    Attributes:
        gain: <q, d> / |d|^2: how much of the vector is received.
        power: |q|^2 / |d|^2.
    """

    gain: float
    power: float

    @property
    def delta(self) -> float:
        """The contraction: 1 - |d - q|^2 / |d|^2."""
        return 2 * self.gain - self.power

    @property
    def noise(self) -> float:
        """The noise of the codec, |q - gain d|^2 / |d|^2."""
        return max(0.0, self.power - self.gain**2)


@lru_cache(maxsize=64)
def modes(topology: Topology) -> tuple[float, ...]:
    """1 - the eigenvalues of W, without the one of the mean; of the symmetric part's mean over a period."""
    mean = torch.stack([topology.matrix(step) for step in range(topology.period)]).mean(0)
    values: list[float] = torch.linalg.eigvalsh((mean + mean.T) / 2).tolist()
    return tuple(1.0 - value for value in values[:-1])


def optimal_step(topology: Topology, fidelity: Fidelity, common: bool) -> float:
    """The best consensus step on a graph, for a codec of that fidelity.

    Args:
        topology: The graph.
        fidelity: As measured; three digits of it matter.
        common: Whether all ranks lose much the same entries.
    """
    return _search(topology, float(f"{fidelity.gain:.3g}"), float(f"{fidelity.power:.3g}"), common)


@lru_cache(maxsize=4096)  # replicas in one process need the same, and a run much the same again
def _search(topology: Topology, gain: float, power: float, common: bool) -> float:
    values = modes(topology)
    if not values:
        return 1.0
    if gain <= 0.0:
        return GRID[-1]  # nothing is received
    mu, gammas = torch.tensor(values, dtype=torch.float64), torch.tensor(GRID, dtype=torch.float64)
    spread, separate = _errors(mu, gammas, Fidelity(gain, power))
    errors = (spread + separate) / 2 if common else spread
    errors = errors + (PUSH / (gammas[:, None] * mu)).square().sum(1)
    best = int(errors.argmin())
    return GRID[best] if bool(errors[best].isfinite()) else GRID[-1]


def _errors(mu: Tensor, gammas: Tensor, fidelity: Fidelity) -> tuple[Tensor, Tensor]:
    """Stationary disagreement for each gamma, with the codec's noise spread over all modes, and separate in each."""
    a, noise = min(fidelity.gain, 1.0), fidelity.noise
    pull = gammas[:, None] * mu  # [gammas, modes]
    step, driven, noisy = _recursion(pull, a)
    eye = torch.eye(3, dtype=torch.float64)
    away = torch.tensor([1.0, -2.0, 1.0], dtype=torch.float64)  # E (x - xhat)^2 of (E x^2, E x xhat, E xhat^2)

    alone = _solve(eye - step, torch.stack((driven, noisy), -1))  # [gammas, modes, 3, 2]
    spans = torch.einsum("i,gmij->gmj", away, alone)
    ranks, still = mu.numel() + 1, 1.0 / (1.0 - (1.0 - a) ** 2)  # the mean, which no mixing moves, is a mode too
    echo = noise * (spans[..., 1].sum(1) + still) / ranks
    common = (spans[..., 0].sum(1) + ranks - 1 + still) / ranks / (1.0 - echo)
    spread = alone[..., 0] + noise * common[:, None, None] * alone[..., 1]
    spread = torch.where((echo < 1.0)[:, None, None], spread, -torch.inf)

    separate = _solve(eye - step - noise * noisy[..., None] * away, (driven + noise * noisy)[..., None]).squeeze(-1)
    return _disagreement(spread), _disagreement(separate)


def _recursion(pull: Tensor, a: float) -> tuple[Tensor, Tensor, Tensor]:
    """How (E x^2, E x xhat, E xhat^2) goes over a step: a matrix, what unit noise adds, what codec noise adds."""
    xx, xh = 1.0 - a * pull, (a - 1.0) * pull  # x' = xx x + xh xhat
    hx, hh = torch.full_like(pull, a), torch.full_like(pull, 1.0 - a)
    rows = (
        (xx * xx, 2 * xx * xh, xh * xh),
        (xx * hx, xx * hh + xh * hx, xh * hh),
        (hx * hx, 2 * hx * hh, hh * hh),
    )
    step = torch.stack([torch.stack(row, -1) for row in rows], -2)
    driven = torch.stack((xx * xx, xx * hx, hx * hx), -1)
    noisy = torch.stack((pull * pull, -pull, torch.ones_like(pull)), -1)
    return step, driven, noisy


def _solve(matrices: Tensor, right: Tensor) -> Tensor:
    """Solutions of all systems; a singular one has none that is finite."""
    solved = torch.linalg.solve_ex(matrices, right)
    return torch.where((solved.info == 0)[..., None, None], solved.result, torch.nan)


def _disagreement(moments: Tensor) -> Tensor:
    """The sum of E x^2 over modes; infinite where the solution is none of a recursion that settles."""
    x2, xh, h2 = moments.unbind(-1)
    settles = ((x2 >= 0) & (h2 >= 0) & (x2 * h2 >= xh * xh * (1 - 1e-9))).all(1)
    return torch.where(settles, x2.sum(1), torch.inf)
