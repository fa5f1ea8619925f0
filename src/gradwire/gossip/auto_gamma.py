"""Automatic gamma: ``gamma=auto``, the consensus step found while training.

Paper:    none; the optimum is that of averaging under delay, the delay is measured
Formula:  r = s - xhat, how far neighbors are;  d = x - xhat, what they have not received yet;  q = C(d)
          lag L = <d, r> / (gamma <r, r>): for how many steps x has followed r before neighbors receive it
          response a = <q, r> / <d, r>: how much of that the codec sends in one step
          gamma = p / ((2 - a) L), at most 1;  p = 2 / (mu_min + mu_max), mu: 1 - the eigenvalues of W
Wire:     six float32 in every header: five sums, which ranks average, and a logarithm, of which they pass on the least
Traits:   no model of the codec, but for the first steps: a slow or noisy codec shows as a long lag. All ranks take the
          same step, bit for bit, so the mean over ranks drifts by rounding alone
Differs:  no paper; this is our own heuristic
Spec:     choco(ring), choco(ring, gamma=auto)

Where the formula comes from: a codec that sends each entry with probability a per step leaves x to follow an old r for
a number of steps that is geometric, 1/a on average: L = 1/a. Then E x^2 along mu is multiplied by
1 - 2 gamma mu / a + (gamma mu)^2 (2 - a) / a^2, and gamma = p a / (2 - a) is best for the slowest and the fastest mu.
Data that differ between ranks push against r in every step: x stands still along that part of r, and the lag looks
shorter than it is. So a selector's lag is never taken to be much less than its gain alone would make it. Where a share
a of the entries is drawn at random, nothing is measured: the lag is 1/a if all ranks draw the same, and if each draws
its own, `optimal_gamma` gives the step. Gradients that pull x back make the lag look shorter while rates are large, and
a step derived from that diverges when rates fall. All else is measured on some thousand entries, evenly spread.

A rank measures in windows, each long enough for a number to get from every rank to every other. Its sums are pooled
with those of others in the next window; the resulting step is agreed on in the window after, as the least that any rank
found; and then taken. Equal steps keep the mean: x_i moves by gamma sum_j w_ij (xhat_j - xhat_i), which sums to zero
over ranks only if gamma is common.
"""

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.codecs import Codec, EncodeInput
from gradwire.core import Key, Segments
from gradwire.gossip.gossip import densify
from gradwire.gossip.optimal_gamma import Fidelity, modes, optimal_step
from gradwire.kernels import philox
from gradwire.topology import Topology

VERSION = 1  # raised whenever the rule changes: results of two rules do not belong into one table
LEAST_WINDOW = 10
SMOOTHING = 0.8  # weight of the past when a window ends
DAMPING = 0.5  # how far towards the new gamma a window goes, on a scale of logarithms
MOST_UP, MOST_DOWN = 2.0**0.5, 0.5  # in one window
LEAST_LAG = 0.5  # of a selector, in units of what its gain alone would make it
LEAST = 1e-5
SAMPLE = 8192  # entries that are measured
PRIOR_ELEMENTS = 2**17

# Places in the state: sums over the window of |d|^2, <q, d>, <d, r>, <q, r>, |r|^2; those of the window before, pooled,
# and the binary logarithm of a step to agree on, which headers carry; smoothed gain, lag, and lag times response, -1
# before there are any; the step, and that of the window before.
SUMS, METADATA, _GAIN, _LAG, _LAG_RESPONSE, _GAMMA, _BEFORE = slice(0, 5), slice(5, 11), 11, 12, 13, 14, 15
METADATA_NUMBERS = METADATA.stop - METADATA.start
_AGREED = 10
LENGTH = 16


class Measurement(NamedTuple):
    """The vectors of one step: the difference to send, what the codec made of it, and how far neighbors were."""

    d: Tensor
    q: Tensor
    r: Tensor


def initial_state(codec: Codec, units: Segments, topology: Topology) -> Tensor:
    """The state at step 0. Where gamma is not known, `optimal_gamma` takes what the codec makes of Gaussian noise."""
    state = torch.zeros(LENGTH, dtype=torch.float64)
    state[_GAIN] = -1.0
    known = known_step(topology, codec)
    first = optimal_step(topology, noise_fidelity(codec, units), same_losses(codec)) if known is None else known
    state[_GAMMA] = state[_BEFORE] = first
    state[_AGREED] = state[_GAMMA].log2().float()
    return state


def gamma(state: Tensor) -> float:
    """The consensus step, as a float32 number: headers may carry it. All rows of stacked states have the same."""
    return float(state[..., _GAMMA].flatten()[0].float())


def metadata(state: Tensor) -> tuple[float, ...]:
    """The numbers that headers carry."""
    return tuple(state[METADATA].tolist())


def after_step(
    state: Tensor,
    measurement: Measurement | None,
    received: Iterable[tuple[float, tuple[float, ...]]],
    step: int,
    topology: Topology,
    codec: Codec,
) -> Tensor:
    """The state after a step, with the neighbors' metadata and weights; none where every rank decides alone."""
    state = state.clone()
    if measurement is not None:
        state[SUMS] += inner_products(measurement).cpu()
    theirs = [(weight, torch.tensor(numbers, dtype=torch.float64)) for weight, numbers in received]
    state[METADATA] = pool(state[METADATA], theirs)
    if (step + 1) % window(topology) == 0:
        close_window_(state, topology, codec, step + 1)
    return state


def inner_products(measurement: Measurement) -> Tensor:
    """|d|^2, <q, d>, <d, r>, <q, r>, |r|^2 of a step, or of each row. -> float64[..., 5]."""
    d, q, r = map(sample, measurement)
    return torch.stack([(x * y).sum(-1) for x, y in ((d, d), (q, d), (d, r), (q, r), (r, r))], -1).double()


def pool(own: Tensor, received: Iterable[tuple[float | Tensor, Tensor]]) -> Tensor:
    """Metadata, of one rank or one in each row, after a step: sums averaged with the neighbors', the least logarithm.

    Rounded as in headers: the sender of a number must compare the same one as its receivers.
    """
    mixed, least = own.clone(), own[..., -1]
    for weight, theirs in received:
        mixed += weight * (theirs - own)
        least = torch.minimum(least, theirs[..., -1])
    mixed[..., -1] = least
    return mixed.float().double()


def close_window_(state: Tensor, topology: Topology, codec: Codec, steps: int) -> None:
    """End a window after so many steps: take the agreed step, evaluate the pooled sums, pool the measured ones."""
    used, now = float(state[_BEFORE]), float(2.0 ** state[_AGREED])
    age = max(1.0, steps - 1.5 * window(topology))  # when the pooled sums were measured
    state[_AGREED] = math.log2(_wanted_step(state, used, age, topology, codec))
    state[METADATA][:-1] = state[SUMS]
    state[METADATA] = state[METADATA].float().double()
    state[SUMS] = 0.0
    state[_BEFORE], state[_GAMMA] = state[_GAMMA].clone(), now


def _wanted_step(state: Tensor, used: float, age: float, topology: Topology, codec: Codec) -> float:
    """The step for the pooled sums, which were measured under the step ``used``, ``age`` steps from the start.

    No entry can have waited longer than that: of waits that are geometric, 1/gain on average, a share is still to come.
    """
    d2, qd, dr, qr, r2 = state[METADATA][:-1].tolist()
    if not math.isfinite(d2 + abs(dr) + r2):
        return max(LEAST, used * MOST_DOWN)
    known = known_step(topology, codec)
    if known is not None:
        return known
    if not (d2 > 0.0 and r2 > 0.0):
        return used
    arrived = 1.0 - (1.0 - min(1.0, max(LEAST, qd / d2))) ** age
    fresh = torch.tensor([qd / d2, dr / r2 / used / arrived, qr / r2 / used / arrived], dtype=torch.float64)
    smoothed = slice(_GAIN, _LAG_RESPONSE + 1)
    state[smoothed] = fresh if float(state[_GAIN]) < 0.0 else SMOOTHING * state[smoothed] + (1 - SMOOTHING) * fresh
    gain, lag, lag_response = state[smoothed].tolist()
    response = min(1.0, max(gain, lag_response / lag)) if lag > 0.0 else min(1.0, gain)
    if codec.selector is not None and gain > 0.0:
        lag = max(lag, LEAST_LAG / gain)  # entries that are left out wait in any case
    best = min(1.0, best_dense_step(topology) / ((2.0 - response) * lag)) if lag > 0.0 else 1.0
    factor = min(MOST_UP, max(MOST_DOWN, (best / used) ** DAMPING))
    return float(max(LEAST, min(1.0, used * factor)))


@lru_cache(maxsize=64)
def best_dense_step(topology: Topology) -> float:
    """The step that averages fastest without compression."""
    positive = [mu for mu in modes(topology) if mu > 1e-9]
    return 2.0 / (min(positive) + max(positive)) if positive else 1.0


def known_step(topology: Topology, codec: Codec) -> float | None:
    """The step where entries are drawn at random and sent exactly, so that the waiting time is known; or None."""
    if codec.selector is None or not (codec.selector.receivers_redraw and codec.quantizer.traits.linear):
        return None
    if topology.period > 1:
        return None  # edges are used in turn, so entries wait longer
    share = codec.selector.capacity(PRIOR_ELEMENTS) / PRIOR_ELEMENTS
    if same_losses(codec):
        return min(1.0, best_dense_step(topology) * share / (2.0 - share))
    return optimal_step(topology, Fidelity(share, share), common=False)


def same_losses(codec: Codec) -> bool:
    """Whether all ranks lose much the same entries: selectors choose by similar data or by equal random bits."""
    return codec.selector is not None and getattr(codec.selector, "shared", True)


def sample(x: Tensor) -> Tensor:
    """Some entries of a flat buffer, or of each row, evenly spread; all of a small one."""
    return x if x.shape[-1] <= SAMPLE else x[..., _sample_indices(x.shape[-1], x.device)]


@lru_cache(maxsize=16)
def _sample_indices(n: int, device: torch.device) -> Tensor:
    return (torch.arange(SAMPLE, dtype=torch.int64) * n // SAMPLE).to(device)


@lru_cache(maxsize=64)
def noise_fidelity(codec: Codec, units: Segments) -> Fidelity:
    """What the codec makes of Gaussian noise of that shape, or of the first part of it."""
    table = units.window(0, PRIOR_ELEMENTS)
    key = Key(0, 0, 0, "gauge")
    named = zip(table.names, table.lengths, strict=True)
    d = torch.cat([philox.normal(key, (name,), n, torch.device("cpu"))[0] for name, n in named])
    q = densify(codec.encode(EncodeInput(d, d, {}, table), key).sent, d)
    d2 = float((d * d).sum())
    return Fidelity(float((q * d).sum()) / d2, float((q * q).sum()) / d2)


@lru_cache(maxsize=64)
def window(topology: Topology) -> int:
    """Steps in which a number gets from every rank to every other, from any step on; at least ten."""
    return max(LEAST_WINDOW, *(_spread(topology, start) for start in range(topology.period)))


def _spread(topology: Topology, start: int) -> int:
    sources = [{rank} for rank in range(topology.size)]
    steps = 0
    while any(len(reached) < topology.size for reached in sources):
        sources = [
            reached.union(*(sources[peer] for peer in topology.peers(rank, start + steps)))
            for rank, reached in enumerate(sources)
        ]
        steps += 1
    return steps
