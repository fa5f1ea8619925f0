"""Gauge: ``gamma=auto``, the consensus step found while training.

Paper:    none; the optimum is that of averaging under delay, the delay is measured
Formula:  r = s - xhat, how far neighbors are;  d = x - xhat, what they have not heard yet;  q = C(d)
          lag L = <d, r> / (gamma <r, r>): for how many steps x has followed r without anybody's knowing
          response a = <q, r> / <d, r>: how much of that the codec tells in one step
          gamma = p / ((2 - a) L), at most 1;  p = 2 / (mu_min + mu_max), mu: 1 - the eigenvalues of W
Wire:     six float32 in every header: five sums, which ranks average, and a logarithm, of which they pass on the least
Traits:   no model of the codec, but for the first steps: a slow or noisy codec shows as a long lag. All ranks take the
          same step, bit for bit, so the mean over ranks drifts by rounding alone
Differs:  as there is no paper, from nothing
Spec:     choco(ring), choco(ring, gamma=auto)

Where does the formula come from? A codec that tells each entry with probability a per step leaves x to follow an old r
for a number of steps that is geometric, 1/a on average: L = 1/a. Then E x^2 along mu goes by
1 - 2 gamma mu / a + (gamma mu)^2 (2 - a) / a^2, and gamma = p a / (2 - a) serves the slowest and the fastest mu best.
Data that differ between ranks push for ever, and r holds out against them: x stands still along that part of r, which
makes the lag look shorter than it is. So a selector's lag is never taken to be much less than its gain alone would make
it. Where entries are drawn at random, a share a of them, there is nothing to measure: the lag is 1/a, if all ranks draw
the same, and if each draws its own, `steady` knows the step. Gradients that pull x back make the lag look shorter while
rates are large; a step that trusts them runs away when rates fall. All else is measured on some thousand entries,
evenly spread.

A rank measures in windows, each long enough for news to get from everybody to everybody. Its sums are pooled with those
of others in the next window, so that few ranks in trouble weigh as much as their trouble does; the step that they ask
for is agreed on in the window after, as the least that any rank found; and then taken.
Equal steps are what keeps the mean: x_i moves by gamma sum_j w_ij (xhat_j - xhat_i), which sums to zero over ranks only
if gamma is common.
"""

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.codecs.codec import Codec
from gradwire.codecs.stage import EncodeInput
from gradwire.core.keys import Key
from gradwire.core.segments import Segments
from gradwire.gossip.gossip import dense
from gradwire.gossip.optimal_gamma import Fidelity, modes, steady_step
from gradwire.kernels import philox
from gradwire.topology import Topology

VERSION = 1  # raised whenever the rule changes: results of two rules do not belong into one table
LEAST_WINDOW = 10
SMOOTHING = 0.8  # weight of the past when a window ends
HASTE = 0.5  # how far towards the new gamma a window goes, on a scale of logarithms
MOST_UP, MOST_DOWN = 2.0**0.5, 0.5  # in one window
LEAST_LAG = 0.5  # of a selector, in units of what its gain alone would make it
LEAST = 1e-5
SAMPLE = 8192  # entries that are measured
PRIOR_ELEMENTS = 2**17

# Places in the state: sums over the window of |d|^2, <q, d>, <d, r>, <q, r>, |r|^2; those of the window before, pooled,
# and the binary logarithm of a step to agree on, which headers carry; smoothed gain, lag, and lag times response, -1
# before there are any; the step, and that of the window before.
SUMS, NOTE, _GAIN, _LAG, _TOLD, _GAMMA, _BEFORE = slice(0, 5), slice(5, 11), 11, 12, 13, 14, 15
_AGREED = 10
LENGTH = 16


class Seen(NamedTuple):
    """What a step has to tell: what was meant, what was said of it, and how far neighbors were."""

    d: Tensor
    q: Tensor
    r: Tensor


def begin(codec: Codec, units: Segments, topology: Topology) -> Tensor:
    """The state at step 0: where gamma is not known, by `steady`, from what the codec makes of Gaussian noise."""
    state = torch.zeros(LENGTH, dtype=torch.float64)
    state[_GAIN] = -1.0
    known = known_step(topology, codec)
    found = steady_step(topology, prior(codec, units), loses_alike(codec)) if known is None else known
    state[_GAMMA] = state[_BEFORE] = found
    state[_AGREED] = state[_GAMMA].log2().float()
    return state


def gamma(state: Tensor) -> float:
    """The consensus step, as a float32 number: headers may carry it. All rows of stacked states have the same."""
    return float(state[..., _GAMMA].flatten()[0].float())


def note(state: Tensor) -> tuple[float, ...]:
    """What to write into headers."""
    return tuple(state[NOTE].tolist())


def turn(
    state: Tensor,
    seen: Seen | None,
    heard: Iterable[tuple[float, tuple[float, ...]]],
    step: int,
    topology: Topology,
    codec: Codec,
) -> Tensor:
    """The state after a step in which notes were heard, each with a weight; none where every rank decides alone."""
    state = state.clone()
    if seen is not None:
        state[SUMS] += measured(seen).cpu()
    notes = [(weight, torch.tensor(numbers, dtype=torch.float64)) for weight, numbers in heard]
    state[NOTE] = pooled(state[NOTE], notes)
    if (step + 1) % window(topology) == 0:
        close_(state, topology, codec, step + 1)
    return state


def measured(seen: Seen) -> Tensor:
    """|d|^2, <q, d>, <d, r>, <q, r>, |r|^2 of a step, or of each row. -> float64[..., 5]."""
    d, q, r = map(sample, seen)
    return torch.stack([(x * y).sum(-1) for x, y in ((d, d), (q, d), (d, r), (q, r), (r, r))], -1).double()


def pooled(mine: Tensor, heard: Iterable[tuple[float | Tensor, Tensor]]) -> Tensor:
    """A note, or one in each row, after a step: sums averaged with those heard, of logarithms the least.

    As headers round them: the rank that says a number must compare the same one as those that hear it.
    """
    mixed, least = mine.clone(), mine[..., -1]
    for weight, theirs in heard:
        mixed += weight * (theirs - mine)
        least = torch.minimum(least, theirs[..., -1])
    mixed[..., -1] = least
    return mixed.float().double()


def close_(state: Tensor, topology: Topology, codec: Codec, steps: int) -> None:
    """End a window after so many steps: do what was agreed on, judge what was pooled, pool what was measured."""
    used, now = float(state[_BEFORE]), float(2.0 ** state[_AGREED])
    age = max(1.0, steps - 1.5 * window(topology))  # what is judged now was measured then
    state[_AGREED] = math.log2(_finding(state, used, age, topology, codec))
    state[NOTE][:-1] = state[SUMS]
    state[NOTE] = state[NOTE].float().double()
    state[SUMS] = 0.0
    state[_BEFORE], state[_GAMMA] = state[_GAMMA].clone(), now


def _finding(state: Tensor, used: float, age: float, topology: Topology, codec: Codec) -> float:
    """The step that the pooled sums ask for, which were measured under the step ``used``, ``age`` steps from the start.

    Nobody can have waited longer than that: of waits that are geometric, 1/gain on average, a share is not there yet.
    """
    d2, qd, dr, qr, r2 = state[NOTE][:-1].tolist()
    if not math.isfinite(d2 + abs(dr) + r2):
        return max(LEAST, used * MOST_DOWN)
    known_beforehand = known_step(topology, codec)
    if known_beforehand is not None:
        return known_beforehand
    if not (d2 > 0.0 and r2 > 0.0):
        return used
    there = 1.0 - (1.0 - min(1.0, max(LEAST, qd / d2))) ** age
    fresh = torch.tensor([qd / d2, dr / r2 / used / there, qr / r2 / used / there], dtype=torch.float64)
    known = slice(_GAIN, _TOLD + 1)
    state[known] = fresh if float(state[_GAIN]) < 0.0 else SMOOTHING * state[known] + (1 - SMOOTHING) * fresh
    gain, lag, told = state[known].tolist()
    response = min(1.0, max(gain, told / lag)) if lag > 0.0 else min(1.0, gain)
    if codec.selector is not None and gain > 0.0:
        lag = max(lag, LEAST_LAG / gain)  # entries that are left out wait, whatever else goes on
    best = min(1.0, _plain(topology) / ((2.0 - response) * lag)) if lag > 0.0 else 1.0
    turned = min(MOST_UP, max(MOST_DOWN, (best / used) ** HASTE))
    return float(max(LEAST, min(1.0, used * turned)))


@lru_cache(maxsize=64)
def _plain(topology: Topology) -> float:
    """The step that averages fastest without compression."""
    found = [mu for mu in modes(topology) if mu > 1e-9]
    return 2.0 / (min(found) + max(found)) if found else 1.0


def known_step(topology: Topology, codec: Codec) -> float | None:
    """The step where entries are drawn at random and told as they are, so that how long one waits is known; or None."""
    if codec.selector is None or not (codec.selector.redrawn and codec.quantizer.traits.linear):
        return None
    if topology.period > 1:
        return None  # an edge waits for its turn, too
    share = codec.selector.capacity(PRIOR_ELEMENTS) / PRIOR_ELEMENTS
    if loses_alike(codec):
        return min(1.0, _plain(topology) * share / (2.0 - share))
    return steady_step(topology, Fidelity(share, share), common=False)


def loses_alike(codec: Codec) -> bool:
    """Whether all ranks lose much the same entries: selectors choose by like data or by equal random bits."""
    return codec.selector is not None and getattr(codec.selector, "shared", True)


def sample(x: Tensor) -> Tensor:
    """Some entries of a flat buffer, or of each row, evenly spread; all of a small one."""
    return x if x.shape[-1] <= SAMPLE else x[..., _places(x.shape[-1], x.device)]


@lru_cache(maxsize=16)
def _places(n: int, device: torch.device) -> Tensor:
    return (torch.arange(SAMPLE, dtype=torch.int64) * n // SAMPLE).to(device)


@lru_cache(maxsize=64)
def prior(codec: Codec, units: Segments) -> Fidelity:
    """What the codec makes of Gaussian noise of that shape, or of the first part of it."""
    table = units.window(0, PRIOR_ELEMENTS)
    key = Key(0, 0, 0, "gauge")
    named = zip(table.names, table.lengths, strict=True)
    d = torch.cat([philox.normal(key, (name,), n, torch.device("cpu"))[0] for name, n in named])
    q = dense(codec.encode(EncodeInput(d, d, {}, table), key).sent, d)
    d2 = float((d * d).sum())
    return Fidelity(float((q * d).sum()) / d2, float((q * q).sum()) / d2)


@lru_cache(maxsize=64)
def window(topology: Topology) -> int:
    """Steps in which news gets from everybody to everybody, whatever the step it starts at; at least ten."""
    return max(LEAST_WINDOW, *(_spread(topology, start) for start in range(topology.period)))


def _spread(topology: Topology, start: int) -> int:
    know = [{rank} for rank in range(topology.size)]
    steps = 0
    while any(len(known) < topology.size for known in know):
        know = [
            known.union(*(know[peer] for peer in topology.peers(rank, start + steps)))
            for rank, known in enumerate(know)
        ]
        steps += 1
    return steps
