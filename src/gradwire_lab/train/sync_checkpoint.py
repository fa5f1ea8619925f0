"""What workers that agree on one gradient add to a checkpoint.

model.safetensors      parameters, and the batch-norm statistics that evaluation uses
optimizer.safetensors  its tensors
rank-0.safetensors     a worker's compression memory and own statistics
progress.json          optimizer settings, GradScaler, hosts, and what was counted
"""

from collections.abc import Mapping
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gradwire.comm import Traffic
from gradwire.integrations.wire import Wire
from gradwire_lab.train.checkpoint import (
    OPTIMIZER,
    load_model,
    load_optimizer,
    part,
    prefixed,
    rank_states,
    save_optimizer,
)

if TYPE_CHECKING:
    from gradwire_lab.train.sync_strategy import SyncStrategy


class SyncCheckpoint:
    """Saves and loads the workers of a strategy."""

    def __init__(self, strategy: "SyncStrategy") -> None:
        self.strategy, self.workers, self.rank_info = strategy, strategy.workers, strategy.rank_info

    def rank_states(self) -> list[dict[str, Tensor]]:
        """The state of each worker of this process."""
        pairs = zip(self.workers.wires, self.workers.buffers, strict=True)
        return [{**prefixed(wire.state_dict(), "wire/"), **prefixed(own, "buffer/")} for wire, own in pairs]

    def model_state(self) -> dict[str, Tensor]:
        """What model.safetensors holds. All processes take part."""
        shown = self.workers.evaluation_buffers(self.strategy.recipe.train.buffers)
        return {**self.strategy.model.state_dict(), **shown}

    def progress(self, folder: Path) -> dict[str, Any]:
        """Further fields of progress.json, after writing further files into the folder."""
        scaler = self.strategy.scaler
        counts = {"rings": list(self.strategy.rings.items()), "skipped": self.strategy.account(0)["skipped"]}
        return {
            "hosts": self._hosts,
            "optimizer": save_optimizer(self.strategy.optimizer, folder / OPTIMIZER),
            "scaler": None if scaler is None else scaler.state_dict(),
            "account": {**_account(self.workers.wire), **counts},
        }

    def load(self, folder: Path, progress: Mapping[str, Any]) -> list[dict[str, Tensor]]:
        """Load a checkpoint -> the states of this process's workers; none, if the world had another size.

        A world of another size takes over the mean of all errors, and starts with the evaluated statistics.
        """
        scaler = self.strategy.scaler
        load_model(self.strategy.model, self.strategy.recipe.model.name, folder)
        load_optimizer(self.strategy.optimizer, folder / OPTIMIZER, progress["optimizer"])
        if scaler is not None and progress["scaler"]:
            scaler.load_state_dict(progress["scaler"])
        same_world = progress["world"] == self.rank_info.world
        same_hosts = same_world and progress.get("hosts") == self._hosts
        own = rank_states(folder, self.rank_info.ranks) if same_world else []
        every = [] if same_hosts else rank_states(folder, range(progress["world"]))
        for i, wire in enumerate(self.workers.wires):
            wire.load_state_dict([part(state, "wire/") for state in (own[i : i + 1] if same_hosts else every)])
            _load_account(wire, progress["account"])
        for i, buffers in enumerate(self.workers.buffers):
            for name, x in (part(own[i], "buffer/") if own else self.workers.buffers[0]).items():
                buffers[name].copy_(x)
        self._load_rings(progress)
        return own

    def _load_rings(self, progress: Mapping[str, Any]) -> None:
        """What sessions with other rings would have sent goes on being counted as theirs."""
        account = progress["account"]
        size = len(progress.get("hosts") or range(progress["world"]))
        rings = dict(account.get("rings") or [(size, sum(account["meant"].values()))])
        (here,) = self.strategy.rings
        self.strategy.elsewhere = {size: dense for size, dense in rings.items() if size != here}
        self.strategy.skipped_before = account.get("skipped", 0)

    @property
    def _hosts(self) -> list[list[int]] | None:
        """The ranks of each host, where that makes a difference."""
        layout = self.workers.wire.link.host_layout
        return None if layout is None else [list(host) for host in layout.hosts]


def _account(wire: Wire) -> dict[str, Any]:
    """What a wire has counted, for JSON."""
    accounting = wire.engine.unwrapped.accounting
    return {
        "traffic": astuple(wire.link.traffic),
        "inside": astuple(wire.link.inside),
        "clock": astuple(wire.clock),
        "said": dict(accounting.encoded),
        "meant": dict(accounting.dense),
    }


def _load_account(wire: Wire, account: Mapping[str, Any]) -> None:
    accounting = wire.engine.unwrapped.accounting
    wire.link.traffic = Traffic(*account["traffic"])
    if wire.link.host_layout is not None:
        wire.link.inside = Traffic(*account.get("inside", ()))
    wire.clock.encode, wire.clock.wire, wire.clock.decode = account["clock"]
    for counts, saved in ((accounting.encoded, account["said"]), (accounting.dense, account["meant"])):
        counts.clear()
        counts.update(saved)
