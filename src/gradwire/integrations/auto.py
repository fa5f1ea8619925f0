"""``auto`` as a spec: the library only knows that somebody may choose one; who does is found by an entry point.

The cost model behind the choice belongs to the lab (`gradwire_lab.autotune`), which comes in the same wheel.
"""

from importlib.metadata import entry_points
from typing import Any

from gradwire.comm.rates import LinkSpec
from gradwire.engine.method import Spec
from gradwire.exchanges import Exchange
from gradwire.feedback import Feedback

AUTO = "auto"
GROUP = "gradwire.autotune"


def auto_wire() -> Any:
    """The class of wires that choose their spec by themselves.

    Raises:
        ModuleNotFoundError: None is installed.
    """
    for point in entry_points(group=GROUP, name=AUTO):
        return point.load()
    raise ModuleNotFoundError(
        f"no installed package offers the entry point {AUTO!r} of {GROUP!r}; install gradwire as a package "
        "(pip install gradwire), or name a spec"
    )


def described(
    spec: Spec, link: str | None, feedback: str | Feedback | None, exchange: str | Exchange | None
) -> LinkSpec | None:
    """The link as the caller describes it. Only ``auto`` uses it.

    Raises:
        ValueError: Arguments exclude each other.
    """
    if spec != AUTO:
        if link is not None:
            raise ValueError(
                f"link={link!r} describes a link, which only the spec 'auto' asks for; to pretend that it is so, set "
                "GRADWIRE_LINK in the environment"
            )
        return None
    if feedback is not None or exchange is not None:
        raise ValueError("'auto' chooses feedback and exchange by itself; leave them out, or name a spec")
    return None if link is None else LinkSpec.parse(link)
