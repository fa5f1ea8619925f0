"""deploy/ and the page of flags, as far as they can be checked without a cluster."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gradwire_lab.train import recipe_files
from gradwire_lab.train.data import TASKS
from gradwire_lab.train.models import MODELS
from gradwire_lab.train.recipe import TABLES

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "coming-from.md"


def test_the_manifest_fits_its_schema():
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    yaml = pytest.importorskip("yaml")
    parts = list(yaml.safe_load_all((ROOT / "deploy" / "kubernetes.yaml").read_text()))
    assert {"Service", "Job"} <= {part["kind"] for part in parts}
    for part in parts:
        kubernetes_validate.validate(part, kubernetes_validate.latest_version(), strict=True)
    with pytest.raises(kubernetes_validate.ValidationError, match="replicaz"):
        kubernetes_validate.validate({**parts[0], "replicaz": 1}, kubernetes_validate.latest_version(), strict=True)


def documents(name: str) -> list[Any]:
    yaml = pytest.importorskip("yaml")
    return list(yaml.safe_load_all((ROOT / "deploy" / name).read_text()))


def test_the_trainjob_fits_its_schema():
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install kubeflow-trainer-api")
    (job,) = documents("trainjob.yaml")
    assert models.TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job, "a key that the schema does not have is lost"
    with pytest.raises(ValueError, match="numNodes"):
        models.TrainerV1alpha1TrainJob.from_dict({**job, "spec": {**job["spec"], "trainer": {"numNodes": "four"}}})


def test_the_trainjob_runs_what_the_job_runs():
    (job,) = documents("trainjob.yaml")
    (patch,) = job["spec"]["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    ours, theirs = node["template"]["spec"]["template"], manifests()["Job"]["spec"]["template"]
    (container,), (worker,) = ours["spec"]["containers"], theirs["spec"]["containers"]
    assert ours["metadata"] == theirs["metadata"]
    assert all(ours["spec"][key] == theirs["spec"][key] for key in ("securityContext", "volumes"))
    assert all(container[key] == worker[key] for key in ("securityContext", "volumeMounts"))
    command, trainer = worker["command"], job["spec"]["trainer"]
    assert trainer["command"] == ["torchrun", *command[command.index("--no-python") :]]
    assert trainer["resourcesPerNode"] == worker["resources"]


def test_the_skypilot_task_fits_its_schema():
    schemas = pytest.importorskip("sky.utils.schemas", reason="pip install skypilot")
    jsonschema = pytest.importorskip("jsonschema", reason="pip install skypilot")
    (task,) = documents("skypilot.yaml")
    jsonschema.validate(task, schemas.get_task_schema())
    with pytest.raises(jsonschema.ValidationError, match="num_nodez"):
        jsonschema.validate({**task, "num_nodez": 2}, schemas.get_task_schema())


def test_the_skypilot_task_runs_an_example():
    (task,) = documents("skypilot.yaml")
    (script,) = re.findall(r"examples/\S+", task["run"])
    assert (ROOT / script).exists()
    assert subprocess.run(["bash", "-n", "-c", task["run"]]).returncode == 0


def manifests() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    return {part["kind"]: part for part in yaml.safe_load_all((ROOT / "deploy" / "kubernetes.yaml").read_text())}


def test_pods_run_as_a_user_without_privileges():
    pod = manifests()["Job"]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    for container in pod["containers"]:
        rights = container["securityContext"]
        assert rights["allowPrivilegeEscalation"] is False and rights["capabilities"] == {"drop": ["ALL"]}
        assert not container.get("privileged") and "add" not in rights["capabilities"]


def test_only_pods_of_the_job_reach_its_pods():
    parts = manifests()
    own = {"podSelector": {"matchLabels": parts["Job"]["spec"]["template"]["metadata"]["labels"]}}
    policy = parts["NetworkPolicy"]["spec"]
    assert policy["podSelector"] == own["podSelector"] and set(policy["policyTypes"]) == {"Ingress", "Egress"}
    assert policy["ingress"] == [{"from": [own]}]
    others = [rule for rule in policy["egress"] if rule["to"] != [own]]
    assert [sorted({port["port"] for port in rule["ports"]}) for rule in others] == [[53]]


def test_the_lock_has_hashes_of_what_is_pinned():
    lock = (ROOT / "requirements.lock").read_text()
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    locked = dict(re.findall(r"^(\S+)==(\S+) ", lock, re.MULTILINE))
    assert locked == {name: version for name, version in pinned.items() if name != "torch"}
    for entry in re.split(r"\n(?=\S)", lock.partition("\n")[2].strip()):
        assert re.fullmatch(r"\S+==\S+( ; [^\\\n]+)?( \\\n    --hash=sha256:[0-9a-f]{64})+", entry), entry[:100]


def test_setup_installs_what_is_locked_and_chooses_nothing_else():
    installs = re.findall(r"pip install --quiet (.+)", (ROOT / "Makefile").read_text())
    assert "--no-deps --require-hashes -r requirements.lock" in installs
    for rest in set(installs) - {"--no-deps --require-hashes -r requirements.lock"}:
        assert rest in ("-c constraints.txt torch", "--no-deps -e .")


def test_the_bill_of_materials_names_what_is_installed():
    done = subprocess.run([sys.executable, ROOT / "deploy" / "sbom.py"], capture_output=True, text=True, check=True)
    bill = json.loads(done.stdout)
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.5")
    names = {part["name"]: part for part in bill["components"]}
    assert {"torch", "numpy", "numba", "safetensors", "networkx", "pydantic"} <= names.keys()
    refs = {part["bom-ref"] for part in (*bill["components"], bill["metadata"]["component"])}
    assert len(refs) == len(names) + 1
    assert {edge["ref"] for edge in bill["dependencies"]} == refs
    assert all(set(edge["dependsOn"]) <= refs for edge in bill["dependencies"])
    assert str(ROOT) not in done.stdout and "file:" not in done.stdout


def test_the_slurm_script_is_a_script():
    assert subprocess.run(["bash", "-n", str(ROOT / "deploy" / "slurm.sh")]).returncode == 0


def test_the_commands_of_the_manifests_are_recipes():
    text = (ROOT / "deploy" / "kubernetes.yaml").read_text()
    assert "cifar10-resnet20" in text
    recipe_files.resolve(["cifar10-resnet20", "dgc", "ramp5"])


# Every flag, and every key of a config file, that the five systems read.
FLAGS = {
    "DGCDistributedOptimizer": """results_dir save dataset model input_size resnet_depth model_config type gpus workers
        epochs start-epoch batch-size lr_bb_fix no-lr_bb_fix regime_bb_fix optimizer lr momentum weight-decay print-freq
        resume evaluate mini-batch-size ghost_batch_size pruning_perc use_residue_acc use_pruning use_warmup use_sync
        sync_interval use_nesterov use_cluster use_debug pruning_mode use_hvddist data emsize nhid nlayers clip
        batch_size bptt dropout tied seed log-interval save_dir onnx-export""",
    "deep-gradient-compression": """configs devices evaluate suffix seed deterministic num_threads_per_worker dgc
        compression criterion lr weight_decay schedule_lr_per_epoch warmup_lr_epochs metric meters num_epochs batch_size
        scheduler optimize_bn_separately num_batches_per_step root num_classes image_size val_ratio
        extra_train_transforms compress_ratio sample_ratio strided_sample compress_upper_bound compress_lower_bound
        max_adaptation_iters resample fp16_values int32_indices warmup_epochs warmup_coeff momentum nesterov
        momentum_masking gradient_clipping zero_init_residual wm0 wm5 wm5o mm nm fp16 int32""",
    "layer-wise-aaai20": """data_dir log_dir master_address rank world_size network compress method ratio threshold
        qstates momentum phases workers start-epoch weight-decay init-bn0 print-freq no-bn-wd resume evaluate fp16
        loss-scale distributed dist-url dist-backend local_rank logdir name short-epoch log_all_workers sparsification
        randk ddp seed Randomk Topk Thresholdv AdaptiveThreshold TernGrad RandomDithering""",
    "GradComp": """data emb_size num_hid num_layers init_lr lr_decay epochs batch_size eval_batch_size test_batch_size
        bptt dropout seed use_gpu log_interval save clip exp_name project_name num_workers compressor memory
        compress_ratio clip_const comp_const alpha none topk terngrad adacomp efsignsgd efsigntopk terngradtopk
        efsignadacomp terngradadacomp varbased adacomp2""",
    "ChocoSGD": """work_dir remote_exec data data_dir use_lmdb_data partition_data pin_memory arch train_fast
        stop_criteria num_epochs num_iterations avg_model reshuffle_per_epoch batch_size base_batch_size lr
        lr_schedule_scheme lr_change_epochs lr_fields lr_scale_indicators lr_scaleup lr_scaleup_type lr_scaleup_factor
        lr_warmup lr_warmup_epochs lr_decay lr_onecycle_low lr_gamma lr_mu lr_alpha optimizer adam_beta_1 adam_beta_2
        adam_eps graph_topology comm_algo comm_op compress_ratio compress_warmup_values compress_warmup_epochs
        quantize_level is_biased majority_vote consensus_stepsize choco_consenus_stepsize evaluate_consensus
        mask_momentum clip_grad clip_grad_val local_step turn_on_local_step_from local_adam_memory_treatment
        momentum_factor use_nesterov weight_decay drop_rate densenet_growth_rate densenet_bc_mode densenet_compression
        wideresnet_widen_factor rnn_n_hidden rnn_n_layers rnn_bptt_len rnn_clip rnn_use_pretrained_emb rnn_tie_weights
        rnn_weight_norm manual_seed evaluate eval_freq summary_freq timestamp track_time track_detailed_time
        display_tracked_time evaluate_avg resume checkpoint checkpoint_index save_all_models save_some_models user
        project experiment backend use_ipc hostfile mpi_path mpi_env python_path num_workers n_mpi_process n_sub_process
        world on_cuda comm_device clean_python""",
}


@pytest.mark.parametrize("system", FLAGS)
def test_the_page_of_flags_answers_every_flag(system):
    (section,) = (part for part in PAGE.read_text().split("\n## ") if part.startswith(system))
    theirs = " ".join(line.split(" | ")[0] for line in section.splitlines() if line.startswith("| "))
    missing = [flag for flag in FLAGS[system].split() if not re.search(rf"(?<![\w-]){flag}(?![\w-])", _bare(theirs))]
    assert not missing


def _bare(text):
    return re.sub(r"--|\.", " ", text)


def test_the_page_of_training_names_every_key_model_and_data_set():
    page = (ROOT / "docs" / "training.md").read_text()
    for name, table in TABLES.items():
        _, rows = page.split(f"| `[{name}]` |")
        keys = set(re.findall(r"`(\w+)`", " ".join(row.split(" | ")[0] for row in rows.split("\n\n")[0].splitlines())))
        assert keys == set(table.model_fields), name
    for name in (*MODELS, *TASKS):
        assert f"`{name}`" in page, name


def test_the_page_of_flags_names_recipes_that_exist():
    named = set(re.findall(r"\b(?:cifar10|imagenet|ptb|pydoc)-\w[\w-]*", PAGE.read_text()))
    assert named
    assert named <= set(recipe_files.registered())


def test_the_page_of_flags_names_keys_that_exist():
    ours = "\n".join(line.split(" | ", 1)[-1] for line in PAGE.read_text().splitlines())
    named = set(re.findall(rf"`({'|'.join(TABLES)})\.(\w+)", ours)) - {("model", "safetensors")}  # a file
    assert {"epochs", "densities", "granularity"} <= {key for _, key in named}
    wrong = [f"{table}.{key}" for table, key in named if key not in TABLES[table].model_fields]
    assert not wrong
