"""All gossip handles obey one protocol, and old names warn."""

from typing import Any

import pytest
import torch

import gradwire
from gossip_fixtures import LENGTH, Vector, simulated, vectors
from gradwire.comm.backend import SingleBackend
from gradwire.integrations.gossip import BatchedGossip, ElasticGossip, GossipHandle, GossipSync

HOSTS = ((0, 2), (1, 3))


@pytest.mark.parametrize("handle", [GossipSync, ElasticGossip, BatchedGossip])
def test_handles_have_all_members_of_the_protocol(handle: type) -> None:
    methods = [name for name in vars(GossipHandle) if not name.startswith("_")]
    built_in_init = {"nodes", "hosts"} if handle is BatchedGossip else set()
    assert methods and all(hasattr(handle, name) for name in methods if name not in built_in_init)


def test_ranks_of_a_node_step_by_their_mean_gradient_and_mix_as_one() -> None:
    rows = BatchedGossip(Vector(), 2, "dpsgd(ring)", hosts=HOSTS)
    grads = vectors(4, seed=1)
    averaged = rows.average_rows(grads)
    for host in HOSTS:
        for rank in host:
            assert torch.equal(averaged[rank], (grads[host[0]] + grads[host[1]]) / 2)
    nodes = vectors(2)
    mixed = rows.mix_rows(nodes[[0, 1, 0, 1]])
    assert torch.equal(mixed, BatchedGossip(Vector(), 2, "dpsgd(ring)").mix(nodes)[[0, 1, 0, 1]])
    total, count = rows.sum_over_processes(grads)
    assert torch.equal(total, grads) and count == 4 and rows.max_over_processes(2.0) == 2.0


def test_states_and_counters_of_nodes_belong_to_all_their_ranks() -> None:
    rows = BatchedGossip(Vector(), 2, "choco(ring)", "sign", hosts=HOSTS)
    x = rows.mix_rows(vectors(2)[[0, 1, 0, 1]])
    states, counters = rows.state_dicts(), rows.counters()
    assert len(states) == len(counters) == 4 and counters[0] == counters[2]
    other = BatchedGossip(Vector(), 2, "choco(ring)", "sign", hosts=HOSTS)
    other.load_state_dicts(states)
    other.load_counters(counters)
    assert torch.equal(rows.mix_rows(x), other.mix_rows(x))
    assert rows.counters() == other.counters()
    assert rows.report(3).sent == other.report(1).sent > 0
    assert (rows.report().rounds, rows.report().messages) == (2, 2)


def test_a_report_counts_all_messages_of_a_round() -> None:
    net = simulated(4, "powergossip(ring, iterations=3)")
    for _ in range(3):
        net()
    assert (net.report().rounds, net.report().messages) == (3, 18)


def test_old_names_of_handles_warn() -> None:
    net: Any = gradwire.gossip(Vector(), "dpsgd(ring)", link=SingleBackend())
    with pytest.warns(DeprecationWarning, match="land is now wait"):
        net.land()
    with pytest.warns(DeprecationWarning, match="taken is now resyncs"):
        assert net.taken == 0
    with pytest.warns(DeprecationWarning, match="beside is now ranks_per_node"):
        assert net.report().beside == 1
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = net.no_such_name
    assert net.node.tensors.total == LENGTH
