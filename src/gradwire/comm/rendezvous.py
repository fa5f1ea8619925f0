"""Rendezvous: a table of the peers' addresses, so that a peer that comes back can be found."""

import contextlib
import os
import tempfile
from abc import ABC, abstractmethod
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import torch.distributed as dist

Address = tuple[str, int]


class Rendezvous(ABC):
    """A table of addresses that outlives any of its readers."""

    def write(self, rank: int, address: Address) -> None:
        """Enter an address; it replaces the one before."""
        host, port = address
        self.set_text(f"peer-{rank}", f"{host} {port}")

    def read(self, rank: int) -> Address | None:
        """The last address of a rank; None where there is none, or the table cannot be read now."""
        try:
            host, port = self.get_text(f"peer-{rank}").split()
            return host, int(port)
        except (OSError, RuntimeError, ValueError):
            return None

    @abstractmethod
    def set_text(self, key: str, text: str) -> None:
        """Enter a text under a key, at once for all readers."""

    @abstractmethod
    def get_text(self, key: str) -> str:
        """The text under a key; empty or an error where there is none."""

    @abstractmethod
    def set_default(self, key: str, text: str) -> str:
        """Enter a text unless there is one. Returns the one that is there."""


class FolderRendezvous(Rendezvous):
    """A folder that all ranks share: one small file for each."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    def set_text(self, key: str, text: str) -> None:
        partial = self.folder / f"{key}.{os.getpid()}.partial"
        partial.write_text(f"{text}\n")
        partial.replace(self.folder / key)  # a reader sees the old address or the new one

    def get_text(self, key: str) -> str:
        return (self.folder / key).read_text()

    def set_default(self, key: str, text: str) -> str:
        """Only this user can read the file, and a file of another user is refused."""
        descriptor, partial = tempfile.mkstemp(dir=self.folder)  # readable by its owner alone
        with open(descriptor, "w") as file:
            file.write(text)
        with contextlib.suppress(FileExistsError):
            os.link(partial, self.folder / key)
        os.unlink(partial)
        if (self.folder / key).stat().st_uid != os.geteuid():
            raise PermissionError(f"{self.folder / key} belongs to another user; choose a folder of your own")
        return self.get_text(key)


class StoreRendezvous(Rendezvous):
    """A torch TCPStore. It ends with the process that hosts it, so host it in one that does not train."""

    def __init__(self, host: str, port: int, seconds: float = 10.0) -> None:
        self.store = dist.TCPStore(  # type: ignore[attr-defined]
            host, port, is_master=False, timeout=timedelta(seconds=seconds)
        )

    def set_text(self, key: str, text: str) -> None:
        self.store.set(key, text)

    def get_text(self, key: str) -> str:
        return str(self.store.get(key).decode()) if self.store.check([key]) else ""

    def set_default(self, key: str, text: str) -> str:
        return str(self.store.compare_set(key, "", text).decode())


def rendezvous(place: str | Path | Rendezvous) -> Rendezvous:
    """A shared folder, or ``tcp://host:port`` of a TCPStore that is hosted there."""
    if isinstance(place, Rendezvous):
        return place
    if not str(place).startswith("tcp://"):
        return FolderRendezvous(place)
    parts = urlsplit(str(place))
    if parts.hostname is None or parts.port is None:
        raise ValueError(f"{place!r} names no host and port; write tcp://host:port, or a folder that all ranks share")
    return StoreRendezvous(parts.hostname, parts.port)
