"""``auto`` as a spec. A tuner chooses the spec of a wire while it trains; an entry point names it.

The cost model behind the choice belongs to the lab (`gradwire_lab.autotune`), which comes in the same wheel.
"""

from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import Any, Protocol

from gradwire.comm.backend import Backend
from gradwire.comm.rates import LinkSpec
from gradwire.engine import Spec
from gradwire.integrations.setup import Options

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
        """Lines to show below the plan."""


def find_tuner() -> Callable[..., Tuner]:
    """What makes the tuner of a wire.

    Raises:
        ModuleNotFoundError: None is installed.
    """
    for point in entry_points(group=GROUP, name=AUTO):
        return point.load()  # type: ignore[no-any-return]
    raise ModuleNotFoundError(
        f"no installed package offers the entry point {AUTO!r} of {GROUP!r}; install gradwire as a package "
        "(pip install gradwire), or name a spec"
    )


def described_link(spec: Spec, link: Backend | str | None, options: Options) -> LinkSpec | None:
    """The link as the caller describes it. Only ``auto`` uses it.

    Raises:
        ValueError: Arguments exclude each other.
    """
    text = link if isinstance(link, str) else None
    if spec == AUTO:
        if options.feedback is not None or options.exchange is not None:
            raise ValueError("'auto' chooses feedback and exchange by itself; leave them out, or name a spec")
        return None if text is None else LinkSpec.parse(text)
    if text is not None:
        raise ValueError(
            f"link={text!r} describes a link, which is only used with the spec 'auto'; to emulate a slow link, set "
            "GRADWIRE_LINK in the environment"
        )
    return None
