"""Rendezvous: where peers write down their addresses, so that a peer that comes back can be found."""

import os
from abc import ABC, abstractmethod
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import torch.distributed as dist

Address = tuple[str, int]


class Rendezvous(ABC):
    """A table of addresses that outlives any of its readers."""

    @abstractmethod
    def write(self, rank: int, address: Address) -> None:
        """Enter an address; it replaces the one before."""

    @abstractmethod
    def read(self, rank: int) -> Address | None:
        """The last address of a rank; None where there is none, or the table cannot be read now."""


class FolderRendezvous(Rendezvous):
    """A folder that all ranks share: one small file for each."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    def write(self, rank: int, address: Address) -> None:
        host, port = address
        partial = self.folder / f"peer-{rank}.{os.getpid()}.partial"
        partial.write_text(f"{host} {port}\n")
        partial.replace(self.folder / f"peer-{rank}")  # a reader sees the old address or the new one

    def read(self, rank: int) -> Address | None:
        try:
            host, port = (self.folder / f"peer-{rank}").read_text().split()
            return host, int(port)
        except (OSError, ValueError):
            return None


class StoreRendezvous(Rendezvous):
    """A torch TCPStore. It ends with the process that hosts it, so host it in one that does not train."""

    def __init__(self, host: str, port: int, seconds: float = 10.0) -> None:
        self.store = dist.TCPStore(  # type: ignore[attr-defined]
            host, port, is_master=False, timeout=timedelta(seconds=seconds)
        )

    def write(self, rank: int, address: Address) -> None:
        host, port = address
        self.store.set(f"peer-{rank}", f"{host} {port}")

    def read(self, rank: int) -> Address | None:
        try:
            if not self.store.check([f"peer-{rank}"]):
                return None
            host, port = self.store.get(f"peer-{rank}").decode().split()
            return host, int(port)
        except (RuntimeError, ValueError):
            return None


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
