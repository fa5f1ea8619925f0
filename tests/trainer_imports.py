"""Trainers of other projects, which take seconds to import: imported by the fork server, for all ranks.

A trainer that cannot be imported fails in its own tests.
"""

from contextlib import suppress
from importlib import import_module

for name in ("accelerate", "lightning.pytorch", "transformers.trainer"):
    with suppress(Exception):
        import_module(name)
