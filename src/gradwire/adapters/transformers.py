"""The old place of `gradwire.integrations.transformers`, for one release."""

import warnings

from gradwire.integrations.transformers import *  # noqa: F403
from gradwire.integrations.transformers import __getattr__ as __getattr__

warnings.warn(f"{__name__} is now gradwire.integrations.transformers", DeprecationWarning, stacklevel=2)
