"""``auto`` as a spec. A tuner chooses the spec of a wire while it trains; an entry point names it.

The cost model behind the choice belongs to the lab (`gradwire_lab.autotune`), which comes in the same wheel.
"""

from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import Any, Protocol

from gradwire.comm.rates import LinkSpec
from gradwire.engine.method import Spec
from gradwire.exchanges import Exchange
from gradwire.feedback import Feedback

AUTO = "auto"
GROUP = "gradwire.autotune"


class Tuner(Protocol):
    """Chooses the spec of a wire while it trains.

    Attributes:
        decisions: All so far.
    """

    decisions: Sequence[Any]

    def measure(self, step: Callable[[], Any]) -> Any:
        """Run a step of a plain loop, and measure it. Between two steps the tuner may change the spec."""

    def before_load(self, spec: str) -> None:
        """A state that was saved under this spec is about to be loaded."""

    def note(self) -> str:
        """What a report leaves out."""

    def lines(self) -> list[str]:
        """What to show beside the plan."""


def find_tuner() -> Callable[..., Tuner]:
    """What makes the tuner of a wire.

    Raises:
        ModuleNotFoundError: None is installed.
    """
    for point in entry_points(group=GROUP, name=AUTO):
        found: Callable[..., Tuner] = point.load()
        return found
    raise ModuleNotFoundError(
        f"no installed package offers the entry point {AUTO!r} of {GROUP!r}; install gradwire as a package "
        "(pip install gradwire), or name a spec"
    )


def described_link(
    spec: Spec, link: str | None, feedback: str | Feedback | None, exchange: str | Exchange | None
) -> LinkSpec | None:
    """The link as the caller describes it. Only ``auto`` uses it.

    Raises:
        ValueError: Arguments exclude each other.
    """
    if spec != AUTO:
        if link is not None:
            raise ValueError(
                f"link={link!r} describes a link, which is only used with the spec 'auto'; to emulate a slow link, set "
                "GRADWIRE_LINK in the environment"
            )
        return None
    if feedback is not None or exchange is not None:
        raise ValueError("'auto' chooses feedback and exchange by itself; leave them out, or name a spec")
    return None if link is None else LinkSpec.parse(link)
