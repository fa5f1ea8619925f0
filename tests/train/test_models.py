"""Models: as large as the papers say, shaped as promised, and able to learn."""

import inspect
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradwire_lab.train.models import LANGUAGE, MODELS, build, load
from gradwire_lab.train.models.gpt import GPT, angles, rotate
from gradwire_lab.train.models.lstm import LanguageLSTM
from gradwire_lab.train.models.regime import regime_of, settings_at, transform_of

IMAGE_MODELS = ["resnet20", "resnet9", "alexnet", "vgg16-cifar"]


def size(model: nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize(
    ("name", "options", "count"),
    [
        ("resnet20", {}, 269_722),
        ("resnet32", {}, 464_154),
        ("resnet44", {}, 658_586),
        ("resnet56", {}, 853_018),
        ("resnet110", {}, 1_727_962),
        ("resnet9", {}, 6_573_120),
        ("alexnet", {}, 2_255_296),
        ("vgg16-cifar", {}, 14_728_266),
        ("vgg16", {}, 138_365_992),
        ("resnet18", {}, 11_689_512),
        ("resnet50", {}, 25_557_032),
        ("cnn", {}, 151_306),
        ("lstm", {"vocab": 10_000, "hidden": 700}, 21_861_200),
        ("lstm", {"vocab": 10_000, "hidden": 1500, "tied": True}, 51_034_000),
        ("lstm", {"vocab": 33_278, "hidden": 650, "layers": 3, "tied": True}, 31_819_578),
        ("gpt2", {}, 124_439_808),
        ("gpt", {}, 4_870_144),
        ("gpt", {"positions": "rotary"}, 4_870_144 - 256 * 256),
    ],
)
def test_the_number_of_parameters(name: str, options: dict[str, object], count: int) -> None:
    with torch.device("meta"):
        assert size(build(name, options)) == count


def test_the_names_are_those_of_torchvision() -> None:
    with torch.device("meta"):
        shallow, deep, vgg = (build(name).state_dict() for name in ("resnet18", "resnet50", "vgg16"))
    assert len(shallow) == 122 and len(deep) == 320 and len(vgg) == 97
    assert shallow["layer2.0.downsample.0.weight"].shape == (128, 64, 1, 1)
    assert shallow["layer4.1.bn2.running_var"].shape == (512,)
    assert deep["layer1.0.downsample.1.num_batches_tracked"].shape == ()
    assert deep["layer3.5.conv3.weight"].shape == (1024, 256, 1, 1)
    assert deep["fc.weight"].shape == (1000, 2048)
    assert vgg["features.41.bias"].shape == (512,) and vgg["classifier.6.weight"].shape == (1000, 4096)


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_imagenet_models_halve_five_times(name: str) -> None:
    model = build(name, {"classes": 7}).eval()
    with torch.no_grad():
        assert model(torch.zeros(1, 3, 64, 64)).shape == (1, 7)


def test_the_large_vgg_takes_images_of_224() -> None:
    with torch.device("meta"):
        assert build("vgg16")(torch.empty(2, 3, 224, 224)).shape == (2, 1000)


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_a_step_lowers_the_loss_on_images(name: str) -> None:
    model = build(name, facts={"classes": 4, "channels": 1}, seed=1)
    x, y = torch.rand(4, 1, 32, 32, generator=torch.Generator().manual_seed(0)), torch.arange(4)
    assert model(x).shape == (4, 4)
    assert improves(model, lambda: F.cross_entropy(model(x), y))


def test_the_small_cnn_fits_its_images() -> None:
    for side in (8, 28):
        model = build("cnn", facts={"classes": 10, "channels": 1, "size": side})
        assert model(torch.zeros(2, 1, side, side)).shape == (2, 10)


@pytest.mark.parametrize("name", ["resnet20", "resnet18", "resnet50"])
def test_zero_init_makes_every_block_its_shortcut(name: str) -> None:
    model = build(name, {"zero_init": True}).eval()
    block = model.layer1[1]
    x = torch.rand(1, block.conv1.in_channels, 8, 8)
    assert torch.equal(block(x), x)
    assert not torch.equal(build(name).eval().layer1[1](x), x)


def test_option_a_shortcut_has_no_parameters_and_keeps_every_other_pixel() -> None:
    block = build("resnet20").layer2[0]
    x = torch.arange(16.0 * 16).view(1, 16, 4, 4)
    short = block.downsample(x)
    assert short.shape == (1, 32, 2, 2)
    assert torch.equal(short[:, 8:24], x[:, :, ::2, ::2])
    assert not short[:, :8].any() and not short[:, 24:].any()


def test_the_scale_of_the_logits() -> None:
    x = torch.rand(2, 3, 32, 32)
    full, eighth = (build("resnet9", {"scale": scale}, seed=3).eval() for scale in (1.0, 0.125))
    assert torch.equal(full(x) * 0.125, eighth(x))


def test_an_lstm_starts_as_told() -> None:
    model = build("lstm", {"vocab": 500, "hidden": 16, "init_range": 0.1})
    for weight in (model.embedding.weight, model.head.weight):
        assert weight.abs().max() <= 0.1 and weight.abs().max() > 0.09
    assert not model.head.bias.any()
    tied = build("lstm", {"vocab": 500, "hidden": 16, "tied": True})
    assert tied.embedding.weight is tied.head.weight
    with pytest.raises(ValueError, match="as wide as the hidden state"):
        build("lstm", {"vocab": 5, "hidden": 16, "embed": 8, "tied": True})


def test_an_lstm_goes_on_where_it_stopped() -> None:
    model = build("lstm", {"vocab": 11, "hidden": 8, "dropout": 0.5, "embed": 6}).eval()
    assert isinstance(model, LanguageLSTM)
    tokens = torch.arange(20).view(2, 10) % 11
    whole, end = model(tokens, model.start(2))
    first, middle = model(tokens[:, :4], model.start(2))
    second, end_again = model(tokens[:, 4:], middle)
    assert whole.shape == (2, 10, 11) and end[0].shape == (2, 2, 8)
    assert torch.allclose(torch.cat((first, second), 1), whole, atol=1e-6)
    assert torch.allclose(end[1], end_again[1], atol=1e-6)


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_a_gpt_does_not_look_ahead(positions: str) -> None:
    options = {"vocab": 13, "width": 16, "layers": 2, "heads": 2, "context": 8, "positions": positions}
    model = build("gpt", options, seed=2)
    tokens = torch.arange(16).view(2, 8) % 13
    changed = tokens.clone()
    changed[:, 5:] = 0
    before, after = model(tokens), model(changed)
    assert before.shape == (2, 8, 13)
    assert torch.allclose(before[:, :5], after[:, :5], atol=1e-6)
    assert not torch.allclose(before[:, 5:], after[:, 5:], atol=1e-3)
    with pytest.raises(ValueError, match="do not fit into this GPT's context of 8"):
        model(torch.zeros(1, 9, dtype=torch.int64))


def test_rotary_products_depend_on_distance_only() -> None:
    turns, dice = angles(32, 8), torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 8, generator=dice).expand(32, 8), torch.randn(1, 8, generator=dice).expand(32, 8)
    products = rotate(q, turns) @ rotate(k, turns).T
    assert torch.allclose(products[3, 1], products[30, 28], atol=1e-5)
    assert not torch.allclose(products[3, 1], products[3, 2], atol=1e-3)


@pytest.mark.parametrize("name", ["lstm", "gpt"])
def test_a_step_lowers_the_loss_on_text(name: str) -> None:
    options = {"lstm": {"hidden": 16}, "gpt": {"width": 16, "layers": 2, "heads": 2, "positions": "rotary"}}[name]
    model = build(name, {"dropout": 0.0, **options}, {"vocab": 9, "classes": 10}, seed=1)
    tokens = torch.arange(24).view(2, 12) % 9

    def loss() -> torch.Tensor:
        out = model(tokens) if isinstance(model, GPT) else model(tokens, model.start(2))[0]
        return F.cross_entropy(out.flatten(0, 1), (tokens + 1).flatten() % 9)

    assert improves(model, loss, lr=0.5)


def improves(model: nn.Module, loss, lr: float = 0.02) -> bool:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        assert all(weight.grad is not None for weight in model.parameters())
        optimizer.step()
        losses.append(value.item())
    return losses[-1] < losses[0]


def test_a_seed_means_the_same_weights_and_no_trace() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, second, other = (build("cnn", seed=seed) for seed in (7, 7, 8))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first[0].weight, other[0].weight)


MINE = """
from torch import nn

def make(classes, width=3, **rest):
    model = nn.Linear(width, classes)
    model.regime = {0: {"lr": 0.1, "momentum": 0.9}, 81: {"lr": 0.01}}
    model.input_transform = {"train": lambda x: x + 1}
    model.rest = rest
    return model

number = 3
def wrong(): return 3
def named(num_classes): return nn.Linear(2, num_classes)
"""


def test_a_model_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    model = build(f"{path}:make", {"bias_free": 1}, {"classes": 5, "size": 32})
    assert model.weight.shape == (5, 3)
    assert model.rest == {"bias_free": 1}  # a fact nobody asked for is not forced on **rest
    regime = regime_of(model)
    assert regime is not None
    assert settings_at(regime, 80) == {"lr": 0.1, "momentum": 0.9}
    assert settings_at(regime, 81) == {"lr": 0.01, "momentum": 0.9}
    transform = transform_of(model, training=True)
    assert transform is not None and transform(torch.zeros(1)).item() == 1
    assert transform_of(model, training=False) is None
    assert build(f"{path}:named", {}, {"classes": 5}).weight.shape == (5, 2)  # torchvision's word for it
    with pytest.raises(ValueError, match="no function called 'number'"):
        load(f"{path}:number")
    with pytest.raises(TypeError, match=r"is not a torch\.nn\.Module") as caught:
        build(f"{path}:wrong")
    assert isinstance(caught.value, ValueError)  # which commands say without a traceback
    with pytest.raises(ValueError, match=r"name the function in it too, as in .*mine\.py:make"):
        load(str(path))
    for text, why in (("x = 1\nimport nosuch", "line 2: ModuleNotFoundError"), ("def make(:", "line 1: SyntaxError")):
        path.write_text(text)
        with pytest.raises(ValueError, match=f"mine.py failed: {why}"):
            load(f"{path}:make")


def test_what_a_plain_model_carries() -> None:
    model = nn.Linear(1, 1)
    assert regime_of(model) is None and transform_of(model, training=True) is None
    model.regime = lambda epoch: {"lr": 1 / (1 + epoch)}
    assert settings_at(regime_of(model), 3) == {"lr": 0.25}
    model.regime = {"lr": 0.1}
    with pytest.raises(TypeError, match="a dict from epochs"):
        regime_of(model)
    model.input_transform = 3
    with pytest.raises(TypeError, match="an input_transform is a function"):
        transform_of(model, training=True)


def test_a_model_of_an_installed_package() -> None:
    assert load("torch.nn:Identity") is nn.Identity
    with pytest.raises(ValueError, match="not_there is not installed"):
        load("not_there.models:make")


@pytest.mark.parametrize(
    ("text", "options", "sentence"),
    [
        ("resnet21", {}, "did you mean 'resnet"),
        ("zebra", {}, "choose among resnet20"),
        ("none.py:make", {}, "no file none.py"),
        ("resnet9", {"scales": 1.0}, "did you mean 'scale'"),
        ("resnet9", {"zero_init": True}, "no option called 'zero_init'"),
        ("lstm", {}, "needs the option 'vocab'; give it with --set model.options.vocab=VOCAB"),
        ("lstm", {"vocab": 5, "layers": 0}, "at least one layer"),
        ("gpt", {"positions": "sinus"}, "choose 'learned' or 'rotary'"),
        ("gpt", {"width": 10}, "does not make 8 heads"),
        ("cnn", {"width": "wide"}, "takes no width = 'wide'; it must be of type int"),
        ("cnn", {"width": -3}, "model.options.width = -3: .* negative dimension"),
    ],
)
def test_what_cannot_be_built_is_said(text: str, options: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        build(text, options)


def test_a_depth_that_no_resnet_has() -> None:
    from gradwire_lab.train.models.resnet import resnet

    with pytest.raises(ValueError, match=r"6n \+ 2"):
        resnet(21)


def test_language_models_are_those_that_ask_for_a_vocabulary() -> None:
    assert [name for name, maker in MODELS.items() if "vocab" in inspect.signature(maker).parameters] == [*LANGUAGE]


def test_every_name_has_a_maker() -> None:
    assert all(callable(load(name)) for name in MODELS)
