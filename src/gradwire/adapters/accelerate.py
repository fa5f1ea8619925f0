"""The old place of `gradwire.integrations.accelerate`, for one release."""

import warnings

from gradwire.integrations.accelerate import *  # noqa: F403

warnings.warn(f"{__name__} is now gradwire.integrations.accelerate", DeprecationWarning, stacklevel=2)
