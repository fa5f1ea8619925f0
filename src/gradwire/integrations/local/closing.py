"""The end of local steps, and new rounds: from the outer weights, which all ranks share."""

from typing import TYPE_CHECKING

from gradwire.integrations.local.outer import require_own
from gradwire.integrations.ownership import has_ended, has_local, release_local

if TYPE_CHECKING:
    from gradwire.integrations.local.handle import LocalSync


def restart(handle: "LocalSync") -> None:
    """Let messages under way arrive, and begin a new round from the outer weights and buffers."""
    handle.arrive(early=True)
    handle.outer.restart()
    handle.outer.restart_buffers()
    handle.inside = 0
    if handle.uneven_steps is not None:
        handle.uneven_steps.restart()
    for fragment in handle.fragments:
        fragment.age = 0


def close(handle: "LocalSync", keep_weights: bool) -> None:
    """End local steps, as `LocalSync.close` says. Nothing is sent, so that no rank waits for another's call."""
    for fragment in handle.fragments:
        fragment.wait()
    if handle.group is None and not keep_weights and has_local(handle) and _ends_apart(handle):
        require_own(handle.outer, "outer.close()")
        restart(handle)
    if release_local(handle):
        handle.closing.close()
    if handle.group is not None:
        handle.group.mesh.close()


def require_open(handle: "LocalSync") -> None:
    """Refuse a call of a handle that has no model any more: it would make further rounds of it."""
    if has_ended(handle):
        raise RuntimeError(
            "these local steps have ended: the handle was closed, or another one has taken over the model; remove its "
            "call from the loop"
        )


def _ends_apart(handle: "LocalSync") -> bool:
    """Whether a round has ended, and has left this rank with weights of its own."""
    under_way = any(fragment.age or fragment.pending_result is not None for fragment in handle.fragments)
    apart = under_way or handle.outer.kept or handle.method.alpha
    return bool(apart and handle.steps and not handle.inside)
