"""What a link can do, read from text and written back: ``100mbit,20ms,2ms,0.1%``.

The parts of a link are known by their units: a rate, the one-way delay, its jitter, the share of frames lost.
Units are decimal, as network people count: 1 mbit is a million bits a second.
"""

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from typing import NamedTuple

_NUMBER = re.compile(r"([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d{1,3})?)\s*([a-z%/]*)")

SLOWEST_BITS = 1e3
FASTEST_BITS = 1e13
LONGEST_SECONDS = 60.0


class Quantity(NamedTuple):
    """A kind of number with units.

    Attributes:
        name: Of the quantity.
        units: Powers of ten, and decimal arithmetic: 500us is the float nearest to 0.0005, and prints as 500us again.
        least: The smallest number that a link can have.
        most: The largest.
        written: How a number is written in messages.
        range: The range in words.
    """

    name: str
    units: dict[str, int]
    least: float
    most: float
    written: str
    range: str

    def check(self, value: float) -> float:
        if not self.least <= value <= self.most:
            written = self.written.format(f"{value:g}")
            raise ValueError(f"a {self.name} of {written} is impossible here; give {self.range}")
        return value

    def parse(self, text: str) -> float:
        """Read a number and its unit."""
        number, unit = _split(text)
        if unit not in self.units:
            known = ", ".join(filter(None, self.units))
            if not unit:
                raise ValueError(f"{text.strip()!r} has no unit; append {known}")
            raise ValueError(f"{unit!r} in {text.strip()!r} is no unit of {self.name}; use {known}")
        return self.check(float(number.scaleb(self.units[unit])))

    def write(self, value: float) -> str:
        """In the largest unit that keeps the number at 1 or more, else in the smallest."""
        exact = Decimal(repr(float(value)))
        units = {unit: power for unit, power in self.units.items() if unit}
        fitting = (unit for unit, power in units.items() if exact.scaleb(-power) >= 1)
        unit = next(fitting, min(units, key=units.__getitem__))
        return f"{exact.scaleb(-units[unit]).normalize():f}{unit}"


_UNITS_OF_RATE = {"tbit": 12, "gbit": 9, "mbit": 6, "kbit": 3, "bit": 0}
RATE = Quantity("rate", _UNITS_OF_RATE, SLOWEST_BITS, FASTEST_BITS, "{} bits a second", "1kbit to 10tbit")
TIME = Quantity("time", {"s": 0, "ms": -3, "us": -6}, 0.0, LONGEST_SECONDS, "{} s", f"0s to {LONGEST_SECONDS:g}s")
LOSS = Quantity("loss", {"%": -2, "": 0}, 0.0, math.nextafter(1.0, 0.0), "{}", "0 to below 1, or percent: 0.1%")
# Bits a second: 100mbit, 1gbit. Seconds: 20ms, 500us. A share: 0.1% is 0.001, and so is 0.001.
parse_rate, parse_seconds, parse_share = RATE.parse, TIME.parse, LOSS.parse


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
            RATE.check(self.rate_bits)
        TIME.check(self.delay_seconds)
        TIME.check(self.jitter_seconds)
        LOSS.check(self.loss)
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
            ValueError: A part is no rate, time or percentage, or is out of range; the message names it.
        """
        if text.strip().lower() == "unshaped":
            return LinkSpec()
        parts: dict[str, list[float]] = {"rate": [], "time": [], "loss": []}
        for part in text.split(","):
            unit = _split(part)[1]
            if not unit:
                units = f"{', '.join(RATE.units)}, or for a delay {', '.join(TIME.units)}"
                raise ValueError(f"{part.strip()!r} has no unit; append {units}")
            quantity = TIME if unit in TIME.units else LOSS if unit == "%" else RATE
            parts[quantity.name].append(quantity.parse(part))
        rates, times, losses = parts.values()
        if len(rates) > 1 or len(times) > 2 or len(losses) > 1:
            raise ValueError(f"the link {text!r} gives a value twice; write rate,delay,jitter,loss%")
        delay, jitter = [*times, 0.0, 0.0][:2]
        return LinkSpec(rates[0] if rates else None, delay, jitter, losses[0] if losses else 0.0)

    def __str__(self) -> str:
        times = (self.delay_seconds, self.jitter_seconds)
        parts = [(RATE, self.rate_bits), *((TIME, seconds) for seconds in times), (LOSS, self.loss)]
        return ",".join(quantity.write(value) for quantity, value in parts if value) or "unshaped"


def _split(text: str) -> tuple[Decimal, str]:
    match = _NUMBER.fullmatch(text.strip().lower())
    if match is None:
        raise ValueError(
            f"cannot read {text.strip()!r}; write numbers with their units, separated by commas, as in 100mbit,20ms"
        )
    return Decimal(match[1]), match[2]
