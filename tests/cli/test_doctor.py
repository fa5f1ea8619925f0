"""`gradwire doctor`: what is well, and what is to be fixed."""

import os
import socket
import subprocess
import sys
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fixtures import free_port
from gradwire.comm.torch_backend import connect
from gradwire_lab.cli import doctor
from gradwire_lab.cli.main import app
from gradwire_lab.launcher_env import LauncherRank
from spawn import run_ranks

SEVERAL_HOSTS = LauncherRank(0, 4, 0, 2, "127.0.0.1", 29500)


def fixes(findings: Any) -> set[str]:
    return {one.what for one in findings if one.remedy}


def test_this_machine_is_well() -> None:
    done = CliRunner(env={name: "" for name in ("GLOO_SOCKET_IFNAME",)}).invoke(app, ["doctor"])
    assert torch.__version__ in done.output and "gloo" in done.output
    assert "triton" in done.output or not torch.cuda.is_available()


def test_addresses_that_no_other_host_reaches_are_to_be_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    assert fixes(doctor.interfaces({}, SEVERAL_HOSTS)) == {"host", "rendezvous"}
    assert fixes(doctor.interfaces({"GLOO_SOCKET_IFNAME": "lo"}, SEVERAL_HOSTS)) == {"rendezvous"}
    assert fixes(doctor.interfaces({"GLOO_SOCKET_IFNAME": "nowhere0"}, None)) == {"GLOO_SOCKET_IFNAME"}
    assert not fixes(doctor.interfaces({}, SEVERAL_HOSTS._replace(local_world=4)))
    alone = next(one for one in doctor.interfaces({}, None) if one.what == "host")
    assert "127.0.1.1; on several hosts, set GLOO_SOCKET_IFNAME" in str(alone) and str(alone).startswith("ok ")


def test_values_stand_below_each_other() -> None:
    findings = [*doctor.versions(), *doctor.backends(), doctor.Finding("GLOO_SOCKET_IFNAME", "eth0")]
    assert {str(one).index(one.value) for one in findings} == {24}


def test_old_versions_and_missing_packages_are_to_be_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not fixes(doctor.versions())
    monkeypatch.setattr(torch, "__version__", "2.7.1")
    assert fixes(doctor.versions()) == {"torch"}
    assert doctor._package("no-such-package").remedy


def look(rank: int, world: int) -> Any:
    link = connect()
    return [*doctor.ports(link), doctor.clocks(link), doctor.speed(link)]


def test_ranks_look_at_each_other() -> None:
    for findings in run_ranks(look, 2):
        assert not fixes(findings)
        assert {one.what for one in findings} == {"ports", "clocks", "link"}
        assert "1 of 1" in findings[0].value and "bit" in findings[-1].value


@pytest.mark.study
def test_rank_0_prints_for_all_ranks() -> None:
    common = {**os.environ, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    common["MASTER_PORT"] = str(free_port())
    command = [sys.executable, "-c", "from gradwire_lab.command import run; run()", "doctor"]
    ranks = [
        subprocess.Popen(
            command, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    first, second = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert "2 agree" in first and "link" in first and not second
