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
    """See `strategy.StrategyCheckpoint`."""

    def __init__(self, strategy: "GossipStrategy") -> None:
        self.workers, self.rank_info = strategy.workers, strategy.rank_info
        self.optimizer = strategy.optimizer

    def rank_states(self) -> list[dict[str, Tensor]]:
        replicas = self.workers.replicas
        saved = self.optimizer.state.get(replicas.rows, {})
        moments = {name: x for name, x in saved.items() if isinstance(x, Tensor)}  # rows, and counters of all rows
        return [
            {
                **prefixed(memory, "gossip/"),
                **prefixed(replicas.own_buffers(i), "buffer/"),
                **prefixed({name: x[i] if x.dim() else x for name, x in moments.items()}, "optimizer/"),
                "row": replicas.rows[i],
                "traffic": torch.tensor(self.workers.network.traffic(i), dtype=torch.float64),
            }
            for i, memory in enumerate(self.workers.network.states())
        ]

    def model_state(self) -> dict[str, Tensor]:
        return self.workers.replicas.show_(*self.workers.mean()).state_dict()

    def progress(self, folder: Path) -> dict[str, Any]:
        return {}

    def load(self, folder: Path, progress: Mapping[str, Any]) -> list[dict[str, Tensor]] | None:
        rank_info, network = self.rank_info, self.workers.network
        if progress["world"] != rank_info.world:
            raise ValueError(
                f"the run has the states of {progress['world']} workers of one graph, and there are {rank_info.world} "
                f"now; go on with {progress['world']}"
            )
        if network.elastic and not (folder / f"rank-{rank_info.ranks[0]}.safetensors").is_file():
            return None
        states, replicas = rank_states(folder, rank_info.ranks), self.workers.replicas
        for i, state in enumerate(states):
            replicas.rows[i].copy_(state["row"])
            for name, x in part(state, "buffer/").items():
                replicas.buffers[name][i].copy_(x)
        memories = [part(state, "gossip/") for state in states]
        network.load(replicas, memories, [state["traffic"].tolist() for state in states])
        self._load_moments([part(state, "optimizer/") for state in states])
        return states

    def _load_moments(self, states: list[dict[str, Tensor]]) -> None:
        rows = self.workers.replicas.rows
        for name, first in states[0].items():
            whole = torch.stack([state[name] for state in states]).to(rows.device) if first.dim() else first
            self.optimizer.state[rows][name] = whole

    def barrier(self) -> None:
        self.workers.network.total(torch.zeros(1, device=self.rank_info.device)).item()
