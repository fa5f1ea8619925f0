"""Consistency: before anything is sent, all ranks must have the same configuration.

Every rank sends what it attached: package and wire-format version, spec, model. An error on one rank, even a typing
error in a spec, is raised on all of them. Which ranks share a host is found before that.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from gradwire.comm import Backend, connect
from gradwire.comm.host_backend import HostBackend, subdivide
from gradwire.comm.host_layout import Across, HostLayout, given_hosts, launcher_place
from gradwire.version import VERSION, WIRE_FORMAT

_REMEDY = {
    "call": "call the same everywhere",
    "version": "install the same gradwire everywhere",
    "format": "install the same gradwire everywhere",
    "spec": "attach with the same spec, rules and options everywhere",
    "model": "build the same model, with the same parameters trainable, everywhere",
    "step": "load states of the same step everywhere",
    "seed": "load states of the same seed everywhere",
}


def agree(
    link: Backend, spec: str, model: Mapping[str, str], step: int = 0, error: str | None = None, call: str = ""
) -> None:
    """Compare the configuration with all ranks.

    Raises:
        ValueError: Some rank failed, or attached or loaded something else.
        RuntimeError: Some rank takes a step instead.
    """
    described = json.dumps(list(model.items())).encode()
    fingerprint = f"{len(model)} tensors, fingerprint {hashlib.sha256(described).hexdigest()[:12]}"
    gather_notes(link, {"spec": spec, "model": fingerprint, "step": step, "error": error, "call": call}, model)


def gather_notes(
    link: Backend, mine: Mapping[str, Any], model: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """Send all ranks a note, and refuse what must not differ; the notes of all.

    Args:
        link: To all ranks.
        mine: The note.
        model: What the note's fingerprint of the model stands for. It is sent where models differ.
    """
    error = mine.get("error")
    nothing = {"spec": "", "model": "", "step": 0, "seed": 0, "error": None, "call": ""}
    mine = {"version": VERSION, "format": WIRE_FORMAT, **nothing, **mine}
    if link.barrier is not None:
        link.barrier.enter(f"what fails there ({error})" if error else mine["call"] or "gradwire")
    notes = link.gather_json(mine)
    for rank, other in enumerate(notes):
        if other["error"]:
            where = "" if error == other["error"] else f"on rank {rank}: "
            raise ValueError(where + other["error"])
    for rank, other in enumerate(notes):
        for field, remedy in _REMEDY.items():
            if other[field] != notes[0][field]:
                texts = str(other[field]), str(notes[0][field])
                if field == "model" and model is not None:
                    models = link.gather_json(dict(model))  # all ranks have compared the same notes, and come here
                    texts = _tensors(models[rank]), _tensors(models[0])
                theirs, ours = _differences(*texts)
                raise ValueError(f"rank {rank} has another {field} than rank 0: {theirs}, not {ours}; {remedy}")
    return notes


def devices_differ(link: Backend, device: torch.device) -> bool:
    """Whether ranks have devices of different types, such as CPUs and GPUs."""
    return len({note["device"] for note in gather_notes(link, {"device": device.type})}) > 1


def _tensors(model: Mapping[str, str]) -> str:
    return "; ".join(f"{name} {what}" for name, what in model.items())


def _differences(one: str, other: str) -> tuple[str, str]:
    """Of two lists of clauses, those that the other lacks."""
    lists = one.split("; "), other.split("; ")
    only = [[clause for clause in mine if clause not in theirs] for mine, theirs in (lists, lists[::-1])]
    if not (only[0] and only[1]):  # a clause more, or another order
        only = list(lists)
    return repr("; ".join(only[0])), repr("; ".join(only[1]))


@contextmanager
def errors_on_all_ranks(link: Backend) -> Iterator[None]:
    """A context whose errors are raised on all ranks; the others raise them at their next agreement."""
    try:
        yield
    except (ValueError, TypeError, OSError) as wrong:
        try:
            agree(link, "", {}, error=str(wrong))
        except ValueError as agreed:
            if str(agreed) != str(wrong):  # that of another rank came first
                raise
            raise agreed.with_traceback(wrong.__traceback__) from None


def find_backend(
    link: Backend | str | None, group: "torch.distributed.ProcessGroup | None", across: Across | None
) -> Backend:
    """What carries messages: ``link``, or a process group. With ``across`` it knows hosts; all ranks must ask for that.

    Raises:
        ValueError: Ranks request different things, or the hosts are unknown or differ.
    """
    backend = link if isinstance(link, Backend) else connect(group)
    if across is None or isinstance(backend, HostBackend):
        return backend
    with errors_on_all_ranks(backend):
        given = given_hosts(across)
    notes = gather_notes(backend, {"spec": f"across={given or across}", "place": launcher_place(os.environ)})
    places = [None if note["place"] is None else tuple(note["place"]) for note in notes]
    layout = HostLayout.from_launcher(places) if given is None else HostLayout.of(given)
    layout.check(backend.world)
    return subdivide(backend, layout)
