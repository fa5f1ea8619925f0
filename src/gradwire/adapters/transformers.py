"""The old place of `gradwire.integrations.transformers`, for one release."""

import warnings

from gradwire.integrations.transformers import *  # noqa: F403

warnings.warn(f"{__name__} is now gradwire.integrations.transformers", DeprecationWarning, stacklevel=2)
