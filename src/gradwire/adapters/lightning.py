"""The old place of `gradwire.integrations.lightning`, for one release."""

import warnings

from gradwire.integrations.lightning import *  # noqa: F403
from gradwire.integrations.lightning import __getattr__ as __getattr__

warnings.warn(f"{__name__} is now gradwire.integrations.lightning", DeprecationWarning, stacklevel=2)
