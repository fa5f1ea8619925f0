"""The backend to train over, and which of its ranks share a host; found before anything else is agreed on."""

import os

import torch

from gradwire.comm.backend import Backend
from gradwire.comm.host_backend import HostBackend, subdivide
from gradwire.comm.host_layout import Across, HostLayout, launcher_place
from gradwire.comm.torch_backend import connect
from gradwire.integrations.consistency import compare, errors_on_all_ranks


def find_backend(
    link: Backend | str | None, group: "torch.distributed.ProcessGroup | None", across: Across | None
) -> Backend:
    """What carries messages: ``link``, or a process group. With ``across`` it knows hosts; all ranks must ask for that.

    Raises:
        ValueError: Ranks ask for different things, or the hosts are not known, or not alike.
    """
    backend = link if isinstance(link, Backend) else connect(group)
    if across is None or isinstance(backend, HostBackend):
        return backend
    with errors_on_all_ranks(backend):
        wanted = across if isinstance(across, str) else [[int(rank) for rank in host] for host in across]
    notes = compare(backend, {"spec": f"across={wanted}", "across": wanted, "place": launcher_place(os.environ)})
    if wanted == "hosts":
        layout = HostLayout.from_launcher([None if note["place"] is None else tuple(note["place"]) for note in notes])
    elif isinstance(wanted, str):
        raise ValueError(f"across={wanted!r} is unknown; write 'hosts', or the ranks of each, as in [[0, 1], [2, 3]]")
    else:
        layout = HostLayout.of(wanted)
    layout.check(backend.world)
    return subdivide(backend, layout)
