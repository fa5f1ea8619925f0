"""What workers that gossip add to a checkpoint.

model.safetensors    the mean of all workers' models, with the mean of their statistics
rank-0.safetensors   a worker's own model, statistics, momentum, and the gossip's memory
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradwire_lab.train.checkpoint import part, prefixed, rank_states

if TYPE_CHECKING:
    from gradwire_lab.train.gossip_strategy import GossipStrategy


class GossipCheckpoint:
    """See `SyncCheckpoint`."""

    def __init__(self, strategy: "GossipStrategy") -> None:
        self.workers, self.rank_info = strategy.workers, strategy.rank_info
        self.optimizer = strategy.optimizer

    def rank_states(self) -> list[dict[str, Tensor]]:
        rows, handle = self.workers.rows, self.workers.handle
        saved = self.optimizer.state.get(rows, {})
        moments = {name: x for name, x in saved.items() if isinstance(x, Tensor)}  # rows, and counters of all rows
        return [
            {
                **prefixed(memory, "gossip/"),
                **prefixed(self.workers.buffers[i], "buffer/"),
                **prefixed({name: x[i] if x.dim() else x for name, x in moments.items()}, "optimizer/"),
                "row": rows[i],
                "traffic": torch.tensor(counters, dtype=torch.float64),
            }
            for i, (memory, counters) in enumerate(zip(handle.state_dicts(), handle.counters(), strict=True))
        ]

    def model_state(self) -> dict[str, Tensor]:
        return self.workers.show_(*self.workers.mean_model()).state_dict()

    def progress(self, folder: Path) -> dict[str, Any]:
        return {}

    def load(self, folder: Path, progress: Mapping[str, Any]) -> list[dict[str, Tensor]] | None:
        """None where the checkpoint knows nothing of this worker: its neighbors bring it up to date."""
        rank_info, workers = self.rank_info, self.workers
        if progress["world"] != rank_info.world:
            raise ValueError(
                f"the run has the states of {progress['world']} workers of one graph, and there are {rank_info.world} "
                f"now; continue with {progress['world']}"
            )
        if workers.handle.elastic and not (folder / f"rank-{rank_info.ranks[0]}.safetensors").is_file():
            return None
        states = rank_states(folder, rank_info.ranks)
        for i, state in enumerate(states):
            workers.rows[i].copy_(state["row"])
            for name, x in workers.buffers[i].items():
                x.copy_(state[f"buffer/{name}"])
        workers.load([part(state, "gossip/") for state in states], [state["traffic"].tolist() for state in states])
        for name, first in part(states[0], "optimizer/").items():
            each = [state[f"optimizer/{name}"] for state in states]
            self.optimizer.state[workers.rows][name] = (
                torch.stack(each).to(workers.rows.device) if first.dim() else first
            )
        return states
