"""A resumed run equals one that was not stopped."""

import io

import pytest
import torch
from torch import Tensor

import fixtures
import gradwire
from gossip_fixtures import optimizers, replicas, train

SPECS = [
    ("dpsgd(ring)", "fp16", {}),
    ("choco(ring)", "topk(0.1) | sign", {}),
    ("choco(ring)", "qsgd(levels=7, biased=True)", {"overlap": True}),
    ("choco(one_peer_exponential)", "sign", {}),
    ("deepsqueeze(ring)", "sign", {}),
    ("dcd(ring)", "qsgd", {}),
    ("ecd(ring)", "qsgd", {}),
    ("sgp(arrows([(0, 1), (1, 2), (2, 0), (0, 2)]))", "bf16", {}),
    ("powergossip(ring)", None, {}),
]


def copied(value: object) -> object:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer)


@pytest.mark.parametrize(("spec", "codec", "options"), SPECS)
def test_a_resumed_run_equals_one_that_was_not_stopped(spec: str, codec: str | None, options: dict[str, bool]) -> None:
    models = replicas(3)
    net, sgd = gradwire.gossip_lockstep(models, spec, codec, **options), optimizers(models)
    train(net, models, sgd, range(3), range(12))
    saved = copied((net.state_dict(), [m.state_dict() for m in models], [o.state_dict() for o in sgd]))
    train(net, models, sgd, range(3), range(12, 24))

    again = replicas(3)
    other, sgd_again = gradwire.gossip_lockstep(again, spec, codec, **options), optimizers(again)
    states, weights, moments = saved
    other.load_state_dict(states)
    for model, optimizer, weight, moment in zip(again, sgd_again, weights, moments, strict=True):
        model.load_state_dict(weight)
        optimizer.load_state_dict(moment)
    train(other, again, sgd_again, range(3), range(12, 24))
    for a, b in zip(models, again, strict=True):
        assert fixtures.same(fixtures.tensors(a), fixtures.tensors(b))
    for mine, theirs in zip(net.state_dict(), other.state_dict(), strict=True):
        assert fixtures.same(mine, theirs)


def test_memories_are_keyed_by_parameter_name() -> None:
    models = replicas(3)
    state = gradwire.gossip_lockstep(models, "choco(ring)", "sign").state_dict()[0]
    for name, parameter in models[0].named_parameters():
        assert state[f"x_hat/{name}"].numel() == state[f"mixed/{name}"].numel() == parameter.numel()
    assert all(isinstance(value, Tensor) for value in state.values())


@pytest.mark.parametrize("spec", ["dpsgd(ring)", "choco(ring)"])
def test_a_correction_that_is_still_to_be_added_is_loaded_where_the_parameters_lie(spec: str) -> None:
    models = replicas(2)
    net = gradwire.gossip_lockstep(models, spec, overlap=True)
    train(net, models, optimizers(models), range(2), range(3))
    state, node = net.state_dict()[0], net.nodes[0]
    node.begin(torch.zeros(node.tensors.total, device="meta"))  # which stands for a GPU
    node.load(state)
    assert node.pending is not None and node.pending.device.type == "meta"


def test_states_of_another_run_are_refused() -> None:
    net = gradwire.gossip_lockstep(replicas(3), "choco(ring)", "sign")
    states = net.state_dict()
    with pytest.raises(ValueError, match="attach with the saved spec"):
        gradwire.gossip_lockstep(replicas(3), "choco(ring)", "topk(0.1)").load_state_dict(states)
    with pytest.raises(ValueError, match="load each rank's own"):
        net.load_state_dict([states[1], states[0], states[2]])
    with pytest.raises(ValueError, match="pass one for each"):
        net.load_state_dict(states[:2])
    net()
    with pytest.raises(ValueError, match=r"different steps, \[0, 1\]"):
        net.load_state_dict([*net.state_dict()[:2], states[2]])
    other = gradwire.gossip_lockstep(replicas(3), "choco(ring)", "sign", seed=7).state_dict()
    with pytest.raises(ValueError, match=r"different seeds, \[0, 7\]"):
        net.load_state_dict([*states[:2], other[2]])
    net.load_state_dict(other)
    assert {node.seed for node in net.nodes} == {7}
    wider = [torch.nn.Linear(3, 3) for _ in range(3)]
    with pytest.raises(ValueError, match="another model"):
        gradwire.gossip_lockstep(wider, "choco(ring)", "sign").load_state_dict(states)
    with pytest.raises(ValueError, match="no gradwire state"):
        net.load_state_dict([{}, {}, {}])
