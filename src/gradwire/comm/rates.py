"""What a link can do, read from text and written back: ``100mbit,20ms,2ms,0.1%``.

The parts of a link are told apart by their units: a rate, the one-way delay, its jitter, the share of frames lost.
Units are decimal, as network people count: 1 mbit is a million bits a second.
"""

import re
from dataclasses import dataclass
from decimal import Decimal

# Powers of ten, and decimal arithmetic: 500us is the float nearest to 0.0005, and prints as 500us again.
_RATES = {"tbit": 12, "gbit": 9, "mbit": 6, "kbit": 3, "bit": 0}
_TIMES = {"s": 0, "ms": -3, "us": -6}
_SHARES = {"%": -2, "": 0}
_NUMBER = re.compile(r"([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d{1,3})?)\s*([a-z%/]*)")

SLOWEST_BITS = 1e3
FASTEST_BITS = 1e13
LONGEST_SECONDS = 60.0


@dataclass(frozen=True)
class LinkSpec:
    """A link between a host and the others, the same in both directions.

    Attributes:
        rate_bits: Bits a second, or None for as fast as the machine goes.
        delay_seconds: From one host to another, one way.
        jitter_seconds: The delay varies by up to this much to either side.
        loss: Share of frames lost, 0 to 1.
    """

    rate_bits: float | None = None
    delay_seconds: float = 0.0
    jitter_seconds: float = 0.0
    loss: float = 0.0

    def __post_init__(self) -> None:
        if self.rate_bits is not None:
            _check_rate(self.rate_bits)
        _check_seconds("delay", self.delay_seconds)
        _check_seconds("jitter", self.jitter_seconds)
        _check_loss(self.loss)
        if self.jitter_seconds > self.delay_seconds:
            raise ValueError(
                f"a jitter of {self.jitter_seconds:g} s would let frames arrive before they were sent: "
                f"the delay is only {self.delay_seconds:g} s"
            )

    @property
    def delayed(self) -> bool:
        """Whether it does more to a frame than space it out."""
        return self.delay_seconds > 0 or self.loss > 0  # there is no jitter without a delay

    @staticmethod
    def parse(text: str) -> "LinkSpec":
        """Read a link such as ``100mbit``, ``20ms``, ``100mbit,20ms,2ms,0.1%`` or ``unshaped``.

        Raises:
            ValueError: A part is no rate, time or percentage, or cannot be had; the sentence says which.
        """
        if text.strip().lower() == "unshaped":
            return LinkSpec()
        rates, times, losses = [], [], []
        for part in text.split(","):
            unit = _split(part)[1]
            if unit in _TIMES:
                times.append(parse_seconds(part))
            elif unit == "%":
                losses.append(parse_share(part))
            else:
                rates.append(parse_rate(part))
        if len(rates) > 1 or len(times) > 2 or len(losses) > 1:
            raise ValueError(f"the link {text!r} says something twice; write rate,delay,jitter,loss%")
        delay, jitter = [*times, 0.0, 0.0][:2]
        return LinkSpec(rates[0] if rates else None, delay, jitter, losses[0] if losses else 0.0)

    def __str__(self) -> str:
        parts = [] if self.rate_bits is None else [_write(self.rate_bits, _RATES)]
        parts += [_write(seconds, _TIMES) for seconds in (self.delay_seconds, self.jitter_seconds) if seconds]
        parts += [_write(self.loss, {"%": -2})] if self.loss else []
        return ",".join(parts) or "unshaped"


def parse_rate(text: str) -> float:
    """Bits a second: ``100mbit``, ``1gbit``."""
    return _check_rate(_read(text, "rate", _RATES))


def parse_seconds(text: str) -> float:
    """Seconds: ``20ms``, ``500us``."""
    return _check_seconds("time", _read(text, "time", _TIMES))


def parse_share(text: str) -> float:
    """A share: ``0.1%`` is 0.001, and so is ``0.001``."""
    return _check_loss(_read(text, "loss", _SHARES))


def _split(text: str) -> tuple[Decimal, str]:
    found = _NUMBER.fullmatch(text.strip().lower())
    if found is None:
        raise ValueError(f"cannot read {text.strip()!r}; write a number and its unit, for example 100mbit or 20ms")
    return Decimal(found[1]), found[2]


def _read(text: str, what: str, units: dict[str, int]) -> float:
    number, unit = _split(text)
    if unit not in units:
        found = repr(unit) if unit else "a bare number"
        known = ", ".join(filter(None, units))
        raise ValueError(f"{found} in {text.strip()!r} is no unit of {what}; use {known}")
    return float(number.scaleb(units[unit]))


def _write(value: float, units: dict[str, int]) -> str:
    """In the largest unit that keeps the number at 1 or more, else in the smallest."""
    exact = Decimal(repr(float(value)))
    fitting = (unit for unit, power in units.items() if exact.scaleb(-power) >= 1)
    unit = next(fitting, min(units, key=units.__getitem__))
    return f"{exact.scaleb(-units[unit]).normalize():f}{unit}"


def _check_rate(bits: float) -> float:
    if not SLOWEST_BITS <= bits <= FASTEST_BITS:
        raise ValueError(f"a rate of {bits:g} bits a second is impossible here; give 1kbit to 10tbit")
    return bits


def _check_loss(share: float) -> float:
    if not 0 <= share < 1:
        raise ValueError(f"a loss of {share:g} is impossible; give a share from 0 to below 1, or percent: 0.1%")
    return share


def _check_seconds(what: str, seconds: float) -> float:
    if not 0 <= seconds <= LONGEST_SECONDS:
        raise ValueError(f"a {what} of {seconds:g} s is impossible here; give 0s to {LONGEST_SECONDS:g}s")
    return seconds
