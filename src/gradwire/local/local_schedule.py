"""A schedule of rounds: short ones first, longer ones when the learning rate has fallen.

Paper:    Gu et al., "A quadratic synchronization rule for distributed deep learning", ICLR 2024.
          https://arxiv.org/abs/2310.14423
Formula:  the rounds of the last step in the table that is not after the first step of a round
Wire:     that of the rounds
Traits:   those of the rounds; outer weights, momentum and errors stay when rounds change
Differs:  the paper takes H from the learning rate, H = max(H_0, floor((c / rate)^2)); here the steps at which rounds
          change are written down, and the outer rate and keep may change with them. A round that has begun ends first
Spec:     local_schedule({0: sparseloco(H=1, keep=1.0), 1000: sparseloco(H=5, rate=0.7)}),
          local_schedule({0: diloco(H=10), 2000: diloco(H=30)})
"""

from collections.abc import Mapping
from dataclasses import replace

from gradwire.core import register
from gradwire.local.method import LocalMethod


@register("local_schedule", kind="local")
def local_schedule(rounds: Mapping[int, LocalMethod]) -> LocalMethod:
    """Other rounds from given steps on (Gu et al., ICLR 2024): longer ones, as the learning rate falls."""
    if (
        not isinstance(rounds, Mapping)
        or 0 not in rounds
        or not all(isinstance(x, LocalMethod) for x in rounds.values())
    ):
        raise ValueError(
            "local_schedule takes a table of rounds by step that begins with step 0, as in "
            "local_schedule({0: sparseloco(H=1), 1000: sparseloco(H=5)})"
        )
    return replace(rounds[0], later=tuple((step, chosen) for step, chosen in rounds.items() if step != 0))
