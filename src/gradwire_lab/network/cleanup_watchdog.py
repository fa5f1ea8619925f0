"""Cleanup watchdog: a shell that outlives its owner by a moment, and takes down the namespaces that are left.

SIGKILL leaves an owner no time to clean up, and what its children have started does not die with them. The watchdog
reads a pipe that only the owner holds: a line means that all is well, its end without one that the owner is dead.
"""

import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress

from gradwire_lab.network.namespaces import SBIN

# Twice, since what is about to be killed may be starting something.
_WATCH = """
read -r word && exit
for again in 1 2; do for name; do ip netns pids "$name" | xargs -r kill -9; done; done
for name; do ip netns delete "$name"; done
"""

Watchdog = subprocess.Popen[bytes]


def start(names: Sequence[str]) -> Watchdog:
    """Have namespaces watched over, in a session that no Ctrl-C reaches."""
    return subprocess.Popen(
        ["sh", "-c", _WATCH, "watchdog", *names],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PATH": f"{os.environ.get('PATH', '')}:{SBIN}"},
        start_new_session=True,
    )


def stop(watchdog: Watchdog) -> None:
    """All is taken down already."""
    with suppress(BrokenPipeError):
        watchdog.communicate(b"well\n")
