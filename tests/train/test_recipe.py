import math
import re
import tomllib

import pytest
import torch

from gradwire_lab.train import models, recipe_files
from gradwire_lab.train.compression import method_of
from gradwire_lab.train.optimizers import apply_regime, clip_, decay_groups, optimizer_of, set_hyperparameters
from gradwire_lab.train.recipe import Recipe
from gradwire_lab.train.schedule import Schedule, scale_of

SOURCES = [
    "cifar10-resnet20",
    "cifar10-resnet110",
    "cifar10-resnet44",
    "ptb-lstm1500-dgc",
    "digits",
    "pydoc-gpt",
    "pydoc-lstm",
    "imagenet-resnet18",
    "imagenet-resnet50",
    "imagenet-vgg16bn",
]
STUDY = [
    f"cifar10-{net}-{how}-{what}"
    for net in ("resnet9", "alexnet")
    for how in ("randomk", "topk", "threshold", "terngrad", "qsgd")
    for what in ("layer", "model")
]
LANGUAGE = [
    f"ptb-lstm700-{how}"
    for how in [
        "topk",
        "adacomp",
        "variance",
        "efsign",
        "terngrad",
        "topk-sign",
        "topk-terngrad",
        "adacomp-sign",
        "adacomp-terngrad",
    ]
]


def test_every_experiment_has_a_recipe():
    assert {*SOURCES, *STUDY, *LANGUAGE} <= {
        name for name, entry in recipe_files.registered().items() if not entry.fragment
    }


@pytest.mark.parametrize("name", recipe_files.registered())
def test_a_recipe_resolves_and_reads_back_as_itself(name):
    recipe = recipe_files.resolve(["digits", name])
    assert recipe_files.read(tomllib.loads(recipe_files.dumps(recipe))) == recipe
    assert recipe_files.registered()[name].about.isascii()
    assert recipe_files.registered()[name].about


@pytest.mark.parametrize("name", [name for name, entry in recipe_files.registered().items() if not entry.fragment])
def test_a_recipe_names_options_that_its_model_knows(name):
    recipe = recipe_files.resolve([name])
    with torch.device("meta"):
        model = models.build(recipe.model.name, recipe.model.options, {"vocab": 100, "classes": 10})
    assert any(parameter.is_meta for parameter in model.parameters())


def test_later_files_win_and_overrides_win_over_them():
    recipe = recipe_files.resolve(
        ["cifar10-resnet20", "dgc", "ramp5", "fp16"], ["train.epochs=500", "optimizer.nesterov=true"]
    )
    assert recipe.sync.spec == "dgc(0.001, values=fp16, indices=int32)"
    assert (recipe.sync.ramp, recipe.train.epochs, recipe.optimizer.nesterov) == (5, 500, True)
    assert recipe.model.name == "resnet20"


def test_fragments_of_one_method_add_up():
    recipe = recipe_files.resolve(["cifar10-resnet20", "dgc", "no-masking", "fp16"], ["optimizer.momentum=0.8"])
    made = str(method_of(recipe))
    assert "topk(0.001) | fp16 | int32" in made and "momentum=0.8" in made and "masking=False" in made


def test_a_worker_of_the_large_lstm_is_clipped_as_in_the_source():
    """There, a quarter of a worker's gradient is clipped to 0.25 / sqrt(4), and four of these are added."""
    feedback = method_of(recipe_files.resolve(["ptb-lstm1500-dgc"])).feedback
    assert feedback.clip_factor(norm=3.0, world=4) * 3.0 / 4 == pytest.approx(0.25 / math.sqrt(4))


def test_another_model_drops_the_options_of_the_first():
    recipe = recipe_files.resolve(["pydoc-lstm"], ["model.name=gpt"])
    assert recipe.model.options == {}
    assert recipe_files.resolve(["ptb-lstm700-topk"]).model.options["hidden"] == 700  # the same model's are kept


def test_a_file_of_ones_own_extends_those_of_the_package(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('extends = ["digits", "dgc"]\n[train]\nepochs = 2\n')
    recipe = recipe_files.resolve([str(path)])
    assert (recipe.sync.spec, recipe.train.epochs) == ("dgc(0.001)", 2)
    path.write_text(f'extends = ["{path}"]\n')
    with pytest.raises(ValueError, match="in a circle"):
        recipe_files.resolve([str(path)])


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("train.epoch=3", r"\[train\] has no key 'epoch'; did you mean 'epochs'\?"),
        ("trian.epochs=3", r"no table \[trian\]; did you mean 'train'\?"),
        ("train.epochs=many", "train.epochs = 'many'"),
        ("train.epochs=-1", "train.epochs = -1"),
        ("train.batch=1.5", "train.batch = 1.5"),
        ("train.precision=bf61", "did you mean 'bf16'?"),
        ("data.name=cifar11", "did you mean 'cifar10'?"),
        ("model.name=resent9", "did you mean 'resnet9'?"),
        ("sync.spec=tokp(0.1)", "did you mean topk?"),
        ("sync.rules=[{spec='fp16', nane='x'}]", "did you mean 'name'?"),
        ("schedule.points=[[1, 0], [0, 1]]", "by rising epoch"),
        ("sync.rules=[{spec='tpok(0.1)'}]", "did you mean topk?"),
        ("sync.bundle=fp17", "did you mean fp16?"),
        ("schedule.milestones=[30, 20]", "must rise"),
        ("data.sizes=[[1, 6], [2, 8]]", "by rising epoch from 0"),
        ("data.sizes=[[0, 6], [0, 8]]", "by rising epoch from 0"),
        ("data.sizes=[[0, 6, 8]]", r"such as \[\[0, 24\], \[10, 32\]\]"),
        ("data.sizes=[[0, 0]]", "pairs"),
        ("sync.spec=choco(ring)", "write --set gossip.method=choco instead"),
        ("sync.spec=onebit_adam", "'onebit_adam' compresses the momentum of AdamW.*--set optimizer.name=adamw"),
        ("sync.rules=[{spec='dgc_adam'}]", "'dgc_adam' compresses the momentum of AdamW"),
        ("sync.spec=demo", "SGD has momentum of its own, and 'demo'.*--set optimizer.momentum=0"),
        ("epochs=3", "'epochs=3' names no table of the recipe; write table.key=value, as in train.epochs=500"),
        ("train.epochs", "'train.epochs' names no value; write table.key=value"),
    ],
)
def test_what_is_wrong_gets_a_sentence(override, sentence):
    with pytest.raises(ValueError, match=sentence):
        recipe_files.resolve(["digits"], [override])


@pytest.mark.parametrize("spec", ["dgc(0.01)", "demo", "ef21_sgdm"])
def test_momentum_before_compression_is_not_for_a_recipe_with_adamw(spec):
    with pytest.raises(ValueError, match=rf"AdamW has momentum.*'{re.escape(spec)}'.*optimizer.name=sgd"):
        recipe_files.resolve(["pydoc-gpt"], [f"sync.spec={spec}"])


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("digist", "did you mean 'digits'"),
        ("nosuch", "called 'nosuch'; see `gradwire recipes`"),
        ("topk(0.1)", "sync.spec=topk"),
    ],
)
def test_an_unknown_recipe_gets_a_sentence(name, sentence):
    with pytest.raises(ValueError, match=sentence.replace("(", r"\(")):
        recipe_files.resolve([name])


# -- schedules ---------------------------------------------------------------------------------------------------------


def schedule(*overrides: str, world: int = 1, batch: int = 60) -> Schedule:
    recipe = recipe_files.resolve(
        ["cifar10-resnet20"], ["train.batch=60", "train.epochs=100", "schedule.epochs=0", *overrides]
    )
    return Schedule(recipe, scale_of(recipe, world, batch))


def test_the_rate_warms_up_to_the_scaled_one_and_falls_as_a_cosine():
    rates = schedule("optimizer.lr=0.1", world=8)
    assert rates.rate(0) == pytest.approx(0.1)
    assert rates.rate(2.5) == pytest.approx(0.1 * (1 + 3.5))
    assert rates.rate(5) == pytest.approx(0.8)
    assert rates.rate(52.5) == pytest.approx(0.4)
    assert rates.rate(100) == pytest.approx(0.0)


def test_steps_exponential_and_lines():
    steps = schedule("schedule.kind=steps", "schedule.milestones=[30, 60]", "schedule.warmup=0", "optimizer.lr=1.0")
    assert [steps.rate(epoch) for epoch in (0, 29.9, 30, 60)] == pytest.approx([1, 1, 0.1, 0.01])
    decay = schedule("schedule.kind=exponential", "schedule.factor=0.5", "schedule.warmup=0", "optimizer.lr=1.0")
    assert decay.rate(2) == pytest.approx(0.25)
    lines = schedule("schedule.kind=linear", "schedule.points=[[0, 0], [5, 1], [24, 0]]", "schedule.warmup=0")
    assert [lines.rate(epoch) for epoch in (0, 2.5, 5, 14.5, 24, 30)] == pytest.approx([0, 0.05, 0.1, 0.05, 0, 0])


def test_a_shorter_run_stretches_the_schedule():
    lines = ("schedule.kind=linear", "schedule.points=[[0, 0], [5, 1], [24, 0]]", "schedule.warmup=0")
    short = schedule(*lines, "schedule.epochs=24", "train.epochs=12")
    assert short.rate(2.5) == pytest.approx(0.1)
    assert short.rate(12) == pytest.approx(0.0)


def test_milestones_of_ones_own_are_not_stretched_by_what_another_file_says(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('extends = ["digits"]\n[schedule]\nkind = "steps"\nmilestones = [1, 3]\n')
    own = ("schedule.kind=steps", "schedule.milestones=[1, 3]")
    for names, overrides in ((["digits"], own), ([str(path)], ())):
        steps = Schedule(recipe_files.resolve(names, [*overrides, "train.epochs=4", "optimizer.lr=1.0"]))
        assert [steps.rate(epoch) for epoch in (0.9, 1, 2.9, 3)] == pytest.approx([1, 0.1, 0.1, 0.01])
    said = recipe_files.resolve(["digits"], ["schedule.epochs=8", *own])
    assert said.schedule.epochs == 8  # in whichever order


def test_iterations_beyond_all_epochs_stretch_the_schedule_and_fewer_do_not():
    for kind in ("schedule.kind=cosine", "schedule.kind=linear"):
        recipe = recipe_files.resolve(["digits"], [kind, "train.epochs=10", "train.iterations=400"])
        assert Schedule(recipe, steps=20).rate(19) > 0  # the last epoch of 400 steps
        assert Schedule(recipe, steps=20).rate(20) == pytest.approx(0.0)
        assert Schedule(recipe, steps=80).rate(5) == pytest.approx(0.05 / 2)  # half of 10 epochs, where it stops


def test_a_plateau_cuts_the_rate_and_is_remembered():
    rates = schedule("schedule.kind=plateau", "schedule.factor=0.25", "schedule.warmup=0", "optimizer.lr=20.0")
    for loss in (5.0, 4.0, 4.5, 3.0, 3.0):
        rates.record_loss(loss)
    assert rates.rate(3) == pytest.approx(20 / 16)
    again = schedule("schedule.kind=plateau", "schedule.factor=0.25", "schedule.warmup=0", "optimizer.lr=20.0")
    again.load_state_dict(rates.state_dict())
    assert again == rates


def test_scaling_by_the_batch():
    recipe = recipe_files.resolve(["cifar10-resnet44"])
    assert scale_of(recipe, 4, 64) == pytest.approx(math.sqrt(2))  # 256 images, written for 128


def test_a_model_may_bring_its_regime():
    recipe = recipe_files.resolve(["digits"])
    rates = Schedule(recipe, 2.0, {0: {"lr": 0.1, "momentum": 0.8}, 3: {"lr": 0.01}})
    assert rates.settings(0.5) == {"lr": 0.2, "momentum": 0.8}
    assert rates.settings(3.2) == {"lr": 0.02, "momentum": 0.8}


# What the source system's manual shows.
MANUAL = {
    0: {"optimizer": "SGD", "lr": 1e-2, "weight_decay": 5e-4, "momentum": 0.8},
    15: {"lr": 1e-3, "weight_decay": 0},
    20: {"weight_decay": 1e-4},
}


@pytest.mark.parametrize("fragments", [[], ["dgc"]])
def test_a_regime_rules_rate_decay_and_momentum(fragments):
    recipe = apply_regime(recipe_files.resolve(["digits", *fragments], ["optimizer.decay_norms=false"]), MANUAL)
    optimizer = optimizer_of(recipe, torch.nn.Linear(3, 2))
    rates = Schedule(recipe, 1.0, MANUAL)
    for epoch, lr, decay in ((0, 1e-2, 5e-4), (14.9, 1e-2, 5e-4), (15, 1e-3, 0.0), (21, 1e-3, 1e-4)):
        set_hyperparameters(optimizer, rates.settings(epoch))
        assert [group["lr"] for group in optimizer.param_groups] == [lr, lr]
        assert [group["weight_decay"] for group in optimizer.param_groups] == [decay, 0.0]
        assert optimizer.param_groups[0]["momentum"] == 0.8
    assert ("momentum=0.8" in str(method_of(recipe))) == bool(fragments)


@pytest.mark.parametrize(
    ("regime", "names", "sentence"),
    [
        ({0: {"lrr": 1e-3}}, [], "sets 'lrr', which is not a setting; did you mean 'lr'?"),
        (lambda epoch: {"lr": 0.1} if epoch < 5 else {"wd": 0.1}, [], "sets 'wd'"),
        ({0: {"optimizer": "Adam"}}, [], "did you mean 'adamw'?"),
        ({0: {"optimizer": "SGD"}, 3: {"optimizer": "AdamW"}}, [], "changes optimizer"),
        ({0: {"lr": -0.1}}, [], r"optimizer.lr = -0\.1"),
        ({0: {"momentum": 0.9}, 3: {"momentum": 0.95}}, ["dgc"], "changes momentum"),
        ({0: {"weight_decay": 0.1}, 3: {"weight_decay": 0}}, ["ring8"], "changes weight_decay"),
    ],
)
def test_a_regime_that_cannot_be_obeyed_is_a_sentence(regime, names, sentence):
    with pytest.raises(ValueError, match=sentence):
        apply_regime(recipe_files.resolve(["digits", *names]), regime)


# -- optimizers --------------------------------------------------------------------------------------------------------


def test_momentum_is_the_compressors_or_the_optimizers_but_not_both():
    plain, corrected = (
        recipe_files.resolve(["digits"]),
        recipe_files.resolve(["digits", "dgc"], ["optimizer.momentum=0.8"]),
    )
    model = torch.nn.Linear(2, 2)
    assert type(optimizer_of(plain, model)) is torch.optim.SGD
    assert type(optimizer_of(corrected, model)).__module__.startswith("gradwire")
    assert "momentum=0.8" in str(method_of(corrected))


def test_a_ramp_ends_with_the_specs_own_density():
    table = method_of(recipe_files.resolve(["digits", "dgc", "ramp5"]), ramp_steps=100).table
    assert [(step, chain.selector.ratio) for step, chain in table] == [
        (0, 0.25),
        (20, 0.0625),
        (40, 0.015625),
        (60, 0.004),
        (80, 0.001),
        (100, 0.001),
    ]
    denser = method_of(recipe_files.resolve(["digits", "ramp5"]), ramp_steps=100).table  # of topk(0.01)
    assert [chain.selector.ratio for _, chain in denser] == [0.25, 0.0625, 0.015625, 0.01, 0.01, 0.01]
    assert len(method_of(recipe_files.resolve(["digits", "ramp5"], ["sync.spec=dense"]), ramp_steps=100).table) == 1


def test_norms_and_biases_may_be_spared_the_decay():
    model = torch.nn.Linear(3, 2)
    matrices, vectors = decay_groups(model, 0.1, decay_norms=False)
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    optimizer = torch.optim.SGD([matrices, vectors], lr=1.0)
    set_hyperparameters(optimizer, {"lr": 0.5, "weight_decay": 0.2})
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.5, 0.2), (0.5, 0.0)]


def test_clipping_shortens_what_is_too_long_only():
    long, short = [torch.tensor([3.0, 4.0]), None], [torch.tensor([0.3, 0.4])]
    clip_(long, 1.0)
    clip_(short, 1.0)
    torch.testing.assert_close(long[0], torch.tensor([0.6, 0.8]))
    torch.testing.assert_close(short[0], torch.tensor([0.3, 0.4]))


def test_defaults_are_a_recipe():
    assert recipe_files.read({}) == Recipe()


@pytest.mark.parametrize("table", ["train", "gossip"])
def test_the_old_name_of_sequential_passes_still_works(table):
    with pytest.warns(FutureWarning, match="sequential"):
        recipe = recipe_files.resolve(["digits"], [f"{table}.passes=in turn"])
    assert getattr(recipe, table).passes == "sequential"


def test_the_old_name_of_the_size_of_buckets_still_works():
    with pytest.warns(FutureWarning, match="bucket_mb"):
        recipe = recipe_files.resolve(["digits"], ["sync.launch_mb=3.0"])
    assert recipe.sync.bucket_mb == 3.0
