"""Descriptors: whether a process may open as many files and sockets as ranks need."""

import sys


def check_descriptors(world: int) -> None:
    """Refuse to start ranks that could not open their files and sockets; inside gloo, that is no sentence.

    Raises:
        ValueError: The limit is too low.
    """
    if sys.platform == "win32":
        return
    import resource

    needed = 64 + 8 * world  # what Python and torch open, and the connections of a few process groups
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise ValueError(f"a process may open {limit} files, and {world} ranks need {needed}; raise it: ulimit -n 4096")
