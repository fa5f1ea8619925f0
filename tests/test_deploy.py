"""deploy/ and the page of flags, as far as they can be checked without a cluster."""

import re
import subprocess
from pathlib import Path

import pytest

from gradwire.train import shelf
from gradwire.train.recipe import TABLES

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "coming-from.md"


def test_the_manifest_fits_its_schema():
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    yaml = pytest.importorskip("yaml")
    for part in yaml.safe_load_all((ROOT / "deploy" / "kubernetes.yaml").read_text()):
        kubernetes_validate.validate(part, kubernetes_validate.latest_version(), strict=True)


def test_the_slurm_script_is_a_script():
    assert subprocess.run(["bash", "-n", str(ROOT / "deploy" / "slurm.sh")]).returncode == 0


def test_the_commands_of_the_manifests_are_recipes():
    text = (ROOT / "deploy" / "kubernetes.yaml").read_text()
    assert "cifar10-resnet20" in text
    shelf.resolve(["cifar10-resnet20", "dgc", "ramp5"])


def test_the_page_of_flags_names_recipes_that_exist():
    named = set(re.findall(r"\b(?:cifar10|imagenet|ptb|pydoc)-\w[\w-]*", PAGE.read_text()))
    assert named
    assert named <= set(shelf.listing())


def test_the_page_of_flags_names_keys_that_exist():
    named = set(re.findall(rf"`({'|'.join(TABLES)})\.(\w+)", PAGE.read_text()))
    assert {"epochs", "densities", "granularity"} <= {key for _, key in named}
    theirs = {("train", name) for name in ("batch_size", "warmup_lr_epochs", "optimize_bn_separately", "scheduler")}
    theirs |= {("model", "zero_init_residual"), ("data", "num_threads_per_worker"), ("train", "py"), ("data", "py")}
    wrong = [f"{table}.{key}" for table, key in named - theirs if key not in TABLES[table].model_fields]
    assert not wrong
