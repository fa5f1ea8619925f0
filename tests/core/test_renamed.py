import importlib
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import pytest
import torch

import gradwire
from gradwire import _RENAMED
from gradwire.codecs.codec import _RENAMED as _RENAMED_OF_CODEC
from gradwire.codecs.selectors import TopK
from gradwire.exchanges import AllGather, Exchange
from gradwire.extend import Selector
from gradwire.feedback import Feedback, NoFeedback


@pytest.mark.parametrize("old", sorted(_RENAMED))
def test_an_old_name_still_works_and_warns(old: str) -> None:
    with pytest.warns(DeprecationWarning, match=_RENAMED[old]):
        assert getattr(gradwire, old) is getattr(gradwire, _RENAMED[old])


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        gradwire.nothing_of_the_kind  # noqa: B018 - the access raises


@pytest.mark.parametrize("name", ["accelerate", "lightning", "transformers"])
def test_an_old_module_still_works_and_warns(name: str) -> None:
    new = importlib.import_module(f"gradwire.integrations.{name}")
    with pytest.warns(DeprecationWarning, match=f"gradwire.integrations.{name}"):
        old = importlib.reload(importlib.import_module(f"gradwire.adapters.{name}"))
    public = {key for key in vars(new) if not key.startswith("_")}
    assert public <= set(vars(old))


@pytest.mark.parametrize("package", ["integrations", "adapters"])
@pytest.mark.parametrize(
    ("name", "new"), [("lightning", "LightningCompression"), ("transformers", "TrainerCompression")]
)
def test_the_old_name_of_a_callback_still_works_and_warns(package: str, name: str, new: str) -> None:
    module = importlib.import_module(f"gradwire.{package}.{name}")
    with pytest.warns(DeprecationWarning, match=new):
        assert module.Compression is getattr(module, new)
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        module.nothing_of_the_kind  # noqa: B018


@pytest.mark.parametrize("old", sorted(_RENAMED_OF_CODEC))
def test_an_old_name_of_a_codec_still_works_and_warns(old: str) -> None:
    codec = gradwire.codec("topk(0.01)")
    with pytest.warns(DeprecationWarning, match=_RENAMED_OF_CODEC[old]):
        assert getattr(codec, old) == attrgetter(_RENAMED_OF_CODEC[old])(codec)
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        codec.nothing_of_the_kind  # noqa: B018 - the access raises


def test_the_old_name_of_the_memories_of_an_exchange_still_works_and_warns() -> None:
    with pytest.warns(DeprecationWarning, match="state_specs"):
        remembers = type("Remembers", (Exchange,), {"slots": lambda self, context: {"mine": 1}})
    assert remembers.state_specs is remembers.slots  # type: ignore[attr-defined]
    with pytest.warns(DeprecationWarning, match="state_specs"):
        assert AllGather().slots is None  # type: ignore[attr-defined]


def test_the_old_name_of_an_exchange_that_keeps_errors_still_works_and_warns() -> None:
    with pytest.warns(DeprecationWarning, match="keeps_server_error"):
        served = type("Served", (Exchange,), {"serves": True})
    assert served.keeps_server_error


@pytest.mark.parametrize(
    ("base", "old", "new"),
    [
        (Exchange, "cuts", "sends_slices"),
        (Exchange, "suits", "auto_may_choose"),
        (Selector, "absorb", "memory_with_gradient"),
        (Selector, "remember", "memory_after_sending"),
        (Feedback, "keeps_mean", "mean_memory"),
    ],
)
def test_the_old_name_of_a_capability_still_works_and_warns(base: type, old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=new):
        made = type("Made", (base,), {old: "mine"})
    assert getattr(made, new) == "mine"
    known = {Exchange: AllGather(), Selector: TopK(0.1), Feedback: NoFeedback()}[base]
    with pytest.warns(DeprecationWarning, match=new):
        assert getattr(known, old) == getattr(known, new)


ENTRY_POINTS: dict[str, Callable[[torch.nn.Module, float], object]] = {
    "compress": lambda net, size: gradwire.compress(net, "sign", launch_mb=size),  # type: ignore[call-arg]
    "DistributedOptimizer": lambda net, size: (
        gradwire.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), 0.1), net.named_parameters(), "sign", launch_mb=size
        ).wire
    ),
    "lockstep": lambda net, size: gradwire.lockstep([net], "sign", launch_mb=size).wires[0],
}


@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_the_old_name_of_bucket_mb_still_works_and_warns(name: str) -> None:
    with pytest.warns(DeprecationWarning, match="bucket_mb"):
        wire = ENTRY_POINTS[name](torch.nn.Linear(2, 2), 3.0)
    assert isinstance(wire, gradwire.Wire) and wire.setup.options.bucket_mb == 3.0


def test_methods_and_exchanges_have_their_old_names() -> None:
    with pytest.warns(DeprecationWarning, match="lane_table"):
        assert gradwire.method("int8").stages == gradwire.method("int8").lane_table
    with pytest.warns(DeprecationWarning, match="encode_slices"):

        class Old(AllGather):
            def encode_shards(self, encode: Any, context: Any) -> Any:
                return "old"

    assert Old().encode_slices(None, None) == "old"  # type: ignore[arg-type]
