"""How a training is spread over processes, and how it ends when one of them dies."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gradwire_lab.launch import RankError
from gradwire_lab.launcher_env import PORT, LauncherRank, first_node, launcher_rank
from gradwire_lab.train import checkpoint, run_modes
from gradwire_lab.train.record import open_folder
from gradwire_lab.train.run_folder import read
from gradwire_lab.train.run_recipe import TrainJob
from training_fixtures import DIGITS, recipe_of

TESTS = Path(__file__).parent.parent
COMMAND = [sys.executable, "-m", "gradwire_lab.cli.main", "train", "digits"]
SMALL = [word for override in DIGITS for word in ("--set", override)]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **more}


# -- standing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "found"),
    [
        ({}, None),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None),
        (
            {
                "RANK": "3",
                "WORLD_SIZE": "8",
                "LOCAL_RANK": "1",
                "MASTER_ADDR": "a",
                "MASTER_PORT": "7",
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": "2",
            },
            LauncherRank(3, 8, 1, 1, "a", 7, True, 2),
        ),
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            LauncherRank(1, 2, 0, 2, "127.0.0.1", PORT, supervised=True),
        ),
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "MASTER_ADDR": "host0"},
            LauncherRank(1, 2, 0, 1, "host0", PORT, supervised=True),
        ),
        (
            {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "4", "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1"},
            LauncherRank(1, 4, 0, 1, "10.0.0.1", PORT, supervised=True),
        ),
        (
            {
                "SLURM_PROCID": "5",
                "SLURM_STEP_NUM_TASKS": "8",
                "SLURM_LOCALID": "1",
                "SLURM_JOB_NODELIST": "gpu[07-09,12],cpu1",
                "SLURM_JOB_ID": "12345",
            },
            LauncherRank(5, 8, 1, 1, "gpu07", 22_345, supervised=True),
        ),
    ],
)
def test_the_environment_says_where_we_stand(told, found):
    assert launcher_rank(told) == found


def test_ranks_on_several_hosts_must_be_told_where_to_meet():
    with pytest.raises(ValueError, match="mpirun -x MASTER_ADDR=host0"):
        launcher_rank({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"})


@pytest.mark.parametrize(("nodes", "first"), [("node1", "node1"), ("a-[3,5-6]", "a-3"), ("x,y", "x")])
def test_slurm_lists_its_nodes(nodes, first):
    assert first_node(nodes) == first


def test_devices_are_dealt_in_turn():
    assert [str(run_modes.device_of(i, ("0", "0", "1", "cpu"))) for i in range(4)] == [
        "cuda:0",
        "cuda:0",
        "cuda:1",
        "cpu",
    ]
    assert (
        run_modes.backend_of(run_modes.device_of(0, ("0", "0")), ("0", "0"), 2) == "gloo"
    )  # NCCL wants a GPU for each
    assert run_modes.backend_of(run_modes.device_of(0, ("0", "1")), ("0", "1"), 2) == "nccl"
    assert run_modes.backend_of(run_modes.device_of(0, ("cpu",)), ("cpu",), 2) == "gloo"


# -- deaths ------------------------------------------------------------------------------------------------------------


def test_a_killed_worker_is_named_and_the_last_checkpoint_is_whole(tmp_path):
    recipe = recipe_of("digits", "model.name=training_fixtures:KillsRank1")
    open_folder(tmp_path, recipe)
    with pytest.raises(RankError, match=r"rank 1 of 2 .*SIGKILL"):
        run_modes.train_spawned(TrainJob(recipe, tmp_path), 2, lambda record: None)
    found = checkpoint.find(tmp_path, "last")
    assert found is not None
    assert found.name == "step-5"
    assert read(tmp_path)[-1]["event"] in ("step", "epoch")


def test_what_is_refused_on_a_rank_is_a_sentence_here(tmp_path):
    recipe = recipe_of("digits", "data.name=ptb", "model.name=lstm")
    open_folder(tmp_path, recipe)
    with pytest.raises(run_modes.TrainingRefused, match="pass --data DIR"):
        run_modes.train_spawned(TrainJob(recipe, tmp_path), 2, lambda record: None)


@pytest.mark.study  # three starts of torchrun take half a minute
def test_torchrun_restarts_and_training_goes_on(tmp_path):
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    model = ["--set", "model.name=training_fixtures:KillsRank1"]
    command = [sys.executable, *start, "--monitor-interval=0.2", "-m", *COMMAND[2:], *SMALL, *model]
    done = subprocess.run(
        [*command, "--folder", str(tmp_path)], env=environment(), capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "from step 5 of 10" in done.stdout
    records = read(tmp_path)
    assert (records[-1]["event"], records[-1]["epoch"]) == ("final", 2)
    assert [record["step"] for record in records if record["event"] == "epoch"] == [5, 10]
