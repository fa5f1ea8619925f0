"""Gauge: ``gamma=auto``, the consensus step found while training.

Each rank measures what the codec makes of its own differences x - xhat (`Fidelity`), in windows of a few steps, and
smooths it. Headers carry the numbers on: a rank that hears of a worse fidelity passes that one on instead. A window
lasts at least as long as news takes to get everywhere, so at its end all ranks know the same worst fidelity, bit for
bit, and look up the same gamma in `steady`. Equal steps are what keeps the mean over ranks: x_i moves by
gamma sum_j w_ij (xhat_j - xhat_i), and these sum to zero over ranks only if gamma is common. It is, so the mean drifts
by rounding alone.

Should differences grow from window to window all the same, the worst growth is passed on in the same way, and all ranks
halve gamma together; every calm window gives a twelfth of an octave back.

State is one float64 vector, saved with the checkpoint.
"""

from collections.abc import Iterable
from functools import lru_cache

import torch
from torch import Tensor

from gradwire.codecs.codec import Codec
from gradwire.codecs.stage import Signal
from gradwire.core.keys import Key
from gradwire.core.segments import Segments
from gradwire.gossip.gossip import dense
from gradwire.gossip.steady import Fidelity, steady_step
from gradwire.kernels import philox
from gradwire.topology import Topology

Note = tuple[float, ...]  # gain, power, growth: float32 numbers

LEAST_WINDOW = 10
SMOOTHING = 0.9  # weight of the past when a window ends
ALARM = 3.0  # growth of |x - xhat|^2 from one window to the next that halves gamma
CALM = 2.0 ** (1 / 12)
PRIOR_ELEMENTS = 2**17

# Places in the state.
_D2, _QD, _Q2 = 0, 1, 2  # sums over this window of |d|^2, <q, d>, |q|^2
_BEFORE = 3  # |d|^2 of the window before
_GAIN, _POWER = 4, 5  # smoothed, of this rank; -1 before the first window
_NOTE = slice(6, 9)  # the worst that was heard in this window; growth -1: nothing yet
_GAMMA, _BRAKE = 9, 10  # the step, and what the safeguard multiplies it by
LENGTH = 11


def begin(codec: Codec, units: Segments, topology: Topology) -> Tensor:
    """The state at step 0: gamma from what the codec makes of Gaussian noise, which all ranks compute alike."""
    state = torch.zeros(LENGTH, dtype=torch.float64)
    state[_GAIN] = state[_POWER] = state[_NOTE] = -1.0
    state[_GAMMA] = steady_step(topology, prior(codec, units), loses_alike(codec))
    state[_BRAKE] = 1.0
    return state


def gamma(state: Tensor) -> float:
    """The consensus step, as a float32 number: headers may carry it."""
    return float((state[_GAMMA] * state[_BRAKE]).float())


def note(state: Tensor) -> Note:
    """What to write into headers."""
    gain, power, growth = state[_NOTE].tolist()
    return gain, power, growth


def turn(
    state: Tensor,
    spoken: Iterable[tuple[Tensor, Tensor]],
    notes: Iterable[Note],
    step: int,
    topology: Topology,
    common: bool,
) -> Tensor:
    """The state after a step in which d was said as q, for each pair in ``spoken``, and neighbors' notes were heard."""
    state = state.clone()
    for d, q in spoken:
        state[: _Q2 + 1] += torch.stack(((d * d).sum(), (q * d).sum(), (q * q).sum())).double().cpu()
    state[_NOTE] = torch.tensor(_worst([note(state), *notes]), dtype=torch.float64)
    if (step + 1) % window(topology) == 0:
        _decide_(state, topology, common)
        _sum_up_(state)
    return state


def _decide_(state: Tensor, topology: Topology, common: bool) -> None:
    """End of a window: what was passed on in it is known to all."""
    gain, power, growth = note(state)
    if growth < 0.0:
        return
    if growth > ALARM:
        state[_BRAKE] = state[_BRAKE] / 2
    else:
        state[_BRAKE] = min(1.0, float(state[_BRAKE]) * CALM)
    if gain >= 0.0:
        state[_GAMMA] = steady_step(topology, Fidelity(gain, power), common)


def _sum_up_(state: Tensor) -> None:
    """What this rank measured in the window becomes what it passes on in the next."""
    d2, qd, q2, before, gain, power = state[: _POWER + 1].tolist()
    if d2 > 0.0:
        fresh = qd / d2, q2 / d2
        old = fresh if gain < 0.0 else (gain, power)
        gain, power = (SMOOTHING * a + (1 - SMOOTHING) * b for a, b in zip(old, fresh, strict=True))
    growth = d2 / before if before > 0.0 else 1.0
    state[_GAIN], state[_POWER], state[_BEFORE] = gain, power, d2
    state[: _Q2 + 1] = 0.0
    # As headers round it, so that the rank that measured compares the same numbers as those that hear of it.
    state[_NOTE] = torch.tensor([gain, power, growth], dtype=torch.float32).double()


def _worst(notes: list[Note]) -> Note:
    """The fidelity with the least contraction, and the largest growth."""
    known = [(2 * gain - power, gain, power) for gain, power, growth in notes if growth >= 0.0 and gain >= 0.0]
    _, gain, power = min(known, default=(0.0, -1.0, -1.0))
    return gain, power, max(growth for _, _, growth in notes)


def loses_alike(codec: Codec) -> bool:
    """Whether all ranks lose much the same entries: selectors choose by like data or by equal random bits."""
    return codec.selector is not None and getattr(codec.selector, "shared", True)


@lru_cache(maxsize=64)
def prior(codec: Codec, units: Segments) -> Fidelity:
    """What the codec makes of Gaussian noise of that shape, or of the first part of it."""
    table = units.window(0, PRIOR_ELEMENTS)
    key = Key(0, 0, 0, "gauge")
    d = torch.cat([philox.normal(key, (name,), n, torch.device("cpu"))[0] for name, n in _named(table)])
    q = dense(codec.encode(Signal(d, d, {}, table), key).sent, d)
    d2 = float((d * d).sum())
    return Fidelity(float((q * d).sum()) / d2, float((q * q).sum()) / d2)


def _named(table: Segments) -> Iterable[tuple[str, int]]:
    return zip(table.names, table.lengths, strict=True)


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
