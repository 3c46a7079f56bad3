"""Launched runs: every process is one rank, only rank 0 reports. The hosts are processes here; the protocol is real."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from support.bench_command import hanging
from support.fake_driver import install_fake_driver
from support.labs import Lab, needs_lab
from support.ports import free_port
from support.processes import living_pids, wait_until
from support.sweeps import rest_is_deep

from bagua.net.bench.driver import NetworkPath
from bagua.net.bench.ranks import Ranks
from bagua.net.bench.result_file import read_result
from bagua.net.library import driver_path, library_path

SMALL_RUN = ["-b", "1K", "-e", "1M", "-f", "32", "-n", "3", "--repeats", "2", "--timeout", "20"]


def clean_environment() -> dict[str, str]:
    launcher = ("RANK", "WORLD_SIZE", "SLURM_", "OMPI_", "PMI_", "NCCL_", "BAGUA_NET_")
    return {name: value for name, value in os.environ.items() if not name.startswith(launcher)}


def start(environments: Sequence[Mapping[str, str]], arguments: Sequence[Sequence[str]]) -> list[subprocess.Popen[str]]:
    return [
        subprocess.Popen(
            [sys.executable, "-m", "bagua.cli.net_bench", *words],
            env={**clean_environment(), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for environment, words in zip(environments, arguments, strict=True)
    ]


def finish(processes: Sequence[subprocess.Popen[str]], timeout_s: float = 120) -> list[tuple[int, str, str]]:
    results = []
    try:
        for process in processes:
            output, errors = process.communicate(timeout=timeout_s)
            results.append((process.returncode, output, errors))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return results


def torchrun(world_size: int, port: int) -> list[dict[str, str]]:
    return [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": "test",
        }
        for rank in range(world_size)
    ]


def slurm(world_size: int, port: int) -> list[dict[str, str]]:
    return [
        {
            "SLURM_PROCID": str(rank),
            "SLURM_STEP_NUM_TASKS": str(world_size),
            "SLURM_LOCALID": str(rank),
            "SLURM_JOB_NODELIST": "localhost",
            "SLURM_JOB_ID": str(port),
        }
        for rank in range(world_size)
    ]


def open_mpi(world_size: int, port: int) -> list[dict[str, str]]:
    return [
        {
            "OMPI_COMM_WORLD_RANK": str(rank),
            "OMPI_COMM_WORLD_SIZE": str(world_size),
            "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
            "OMPI_COMM_WORLD_LOCAL_SIZE": str(world_size),
            "MASTER_PORT": str(port),
        }
        for rank in range(world_size)
    ]


@pytest.fixture
def fake(tmp_path: Path) -> list[str]:
    library = tmp_path / "libnccl-net.so"
    library.touch()
    (tmp_path / "pids").mkdir()
    return ["--driver", str(install_fake_driver(tmp_path)), "--library", str(library)]


# What each launcher sets is in test_bench_launch_environment.py.
@pytest.mark.parametrize("launcher", rest_is_deep([torchrun, slurm, open_mpi], 0))
def test_only_rank_zero_reports(launcher: object, fake: list[str], tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    arguments = [*fake, *SMALL_RUN, "--backends", "plugin,bare,raw", "--raw-streams", "1,2"]
    environments = [
        environment | {"FAKE_DRIVER_PIDS": str(tmp_path / "pids")}
        for environment in launcher(3, free_port(2))  # type: ignore[operator]
    ]
    # Only rank 0 gets a path that exists.
    outputs = [str(path), "/no/such/1.json", "/no/such/2.json"]
    results = finish(start(environments, [[*arguments, "--json", output] for output in outputs]))
    assert [code for code, _, _ in results] == [0, 0, 0], results
    assert "3 ranks x 2 channels" in results[0][1]
    assert "every byte of every size correct" in results[0][1]
    assert [(output, errors) for _, output, errors in results[1:]] == [("", "")] * 2
    result = read_result(path)
    measured = {(one.case["backend"], one.case.get("streams")) for one in result.select("time")}
    assert measured == {("plugin", None), ("bare", None), ("raw", 1), ("raw", 2)}
    assert result.parameters["ranks"] == 3
    assert len(list((tmp_path / "pids").iterdir())) == 3 + 3 + 4
    assert living_pids(tmp_path / "pids") == []


def test_a_driver_that_dies_elsewhere_ends_all_ranks(fake: list[str], tmp_path: Path) -> None:
    fault = json.dumps({"at": "run", "do": "kill", "rank": 1, "transport": "bare"})
    pids = {"FAKE_DRIVER_PIDS": str(tmp_path / "pids"), "FAKE_DRIVER_FAULT": fault}
    environments = [environment | pids for environment in torchrun(2, free_port(2))]
    arguments = [*fake, *SMALL_RUN, "--backends", "plugin,bare"]
    results = finish(start(environments, [arguments, arguments]))
    assert [code for code, _, _ in results] == [1, 1]
    assert "bare rank 1 on " in results[0][2]
    assert "killed by SIGKILL" in results[0][2]
    assert results[1][1:] == ("", "")
    assert living_pids(tmp_path / "pids") == []


def test_a_rank_without_the_library_is_named_by_rank_zero(fake: list[str]) -> None:
    own = [*fake, *SMALL_RUN, "--backends", "plugin"]
    without = [*own, "--library", "/no/libnccl-net.so"]
    results = finish(start(torchrun(2, free_port(2)), [own, without]))
    assert [code for code, _, _ in results] == [1, 1]
    assert "rank 1 on " in results[0][2]
    assert "'/no/libnccl-net.so' does not exist" in results[0][2]


def test_a_rank_without_the_baseline_is_named_by_rank_zero(fake: list[str], tmp_path: Path) -> None:
    (tmp_path / "libold.so").touch()
    words = [*fake, *SMALL_RUN, "--backends", "plugin", "--baseline-library"]
    there, elsewhere = [*words, str(tmp_path / "libold.so")], [*words, "/no/libold.so"]
    results = finish(start(torchrun(2, free_port(2)), [there, there]))
    assert [code for code, _, _ in results] == [0, 0], results
    assert "plugin vs baseline: " in results[0][1]
    results = finish(start(torchrun(2, free_port(2)), [there, elsewhere]))
    assert [code for code, _, _ in results] == [1, 1]
    assert "rank 1 on " in results[0][2]
    assert "the baseline's library '/no/libold.so' does not exist" in results[0][2]


def test_a_killed_rank_ends_the_others(fake: list[str], tmp_path: Path) -> None:
    fault = json.dumps({"at": "run", "do": "hang", "transport": "bare"})
    pids = {"FAKE_DRIVER_PIDS": str(tmp_path / "pids"), "FAKE_DRIVER_FAULT": fault}
    arguments = [*fake, *SMALL_RUN, "--backends", "bare"]
    processes = start([environment | pids for environment in torchrun(2, free_port(2))], [arguments, arguments])
    wait_until(lambda: hanging(tmp_path / "pids") == 2, "the run of both drivers")
    processes[1].kill()
    results = finish(processes)
    assert results[0][0] == 1
    assert "the connection to rank 1" in results[0][2]
    assert "Traceback" not in results[0][2]
    # Rank 1 had no chance to end its driver, which follows its parent by itself.
    wait_until(lambda: not living_pids(tmp_path / "pids"), "the end of the drivers")


def test_a_port_in_use_is_named_within_seconds(fake: list[str]) -> None:
    port = free_port(2)
    with socket.create_server(("127.0.0.1", port + 1)):
        results = finish(start(torchrun(2, port)[:1], [fake]))
    assert results[0][0] == 1
    assert f"port {port + 1} on " in results[0][2]
    assert "another program holds it: give every rank the same free one with --port" in results[0][2]


def test_a_rank_that_is_never_started_is_named_in_time(fake: list[str]) -> None:
    results = finish(start(torchrun(2, free_port(2))[:1], [[*fake, "--timeout", "1.5"]]))
    assert results[0][0] == 1
    assert "waiting on port" in results[0][2]
    assert "1 of 2 ranks (rank 1) did not reach port" in results[0][2]
    assert "see that torchrun started them all" in results[0][2]


def test_options_that_contradict_the_launcher(fake: list[str]) -> None:
    results = finish(start(torchrun(2, free_port(2))[:1], [[*fake, "--ranks", "4"]]))
    assert results[0][0] == 2
    assert "--ranks 4, but torchrun started 2 ranks" in results[0][2]


def test_one_launched_process_or_local_is_a_local_run(fake: list[str]) -> None:
    arguments = [*fake, *SMALL_RUN, "--backends", "bare"]
    environments = [torchrun(1, free_port(2))[0], torchrun(2, free_port(2))[1]]
    results = finish(start(environments, [arguments, [*arguments, "--local"]]))
    assert [code for code, _, _ in results] == [0, 0], results
    assert all("2 ranks x 2 channels on one host" in output for _, output, _ in results)


def test_the_real_drivers_under_torchrun_variables(tmp_path: Path) -> None:
    assert driver_path().is_file()
    assert library_path().is_file()
    path = tmp_path / "run.json"
    arguments = [*SMALL_RUN, "--backends", "plugin,plugin-1,bare,raw", "--timeout", "60"]
    results = finish(start(torchrun(2, free_port(2)), [[*arguments, "--json", str(path)], arguments]))
    assert [code for code, _, _ in results] == [0, 0], results
    result = read_result(path)
    assert (result.parameters["verified"], result.notes) == (True, ())
    assert all(time.median > 0 for time in result.select("time"))


class _Nowhere:
    """A place that starts nothing."""


@pytest.mark.parametrize(
    ("identities", "measured_link", "links"),
    [
        (["a", "a"], 0, 2),  # one host: all connections share its loopback
        (["a", "a", "a", "a"], 0, 4),
        (["a", "b"], 0, 1),
        (["a", "a", "b", "b"], 1, 1),  # only rank 1 -> 2 leaves rank 0's host
        (["a", "b", "a", "b"], 0, 2),  # round robin: two connections leave it
    ],
)
def test_the_measured_path(identities: list[str], measured_link: int, links: int) -> None:
    ranks = Ranks([_Nowhere() for _ in identities], identities, NetworkPath("10.0.0.1", "eth0"))  # type: ignore[misc]
    assert (ranks.measured_link, ranks.links) == (measured_link, links)
    assert ranks.hosts == len(set(identities))


@needs_lab
def test_joined_interfaces_are_measured_as_one_device() -> None:
    with Lab(nics=2, ip_versions=(4,)) as lab:
        launch = {
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": lab.hosts[0].address(0),
            "MASTER_PORT": "29500",
            "BAGUA_NET_JOIN_NICS": "eth0+eth1",
        }
        processes = []
        for host in range(2):
            variables = {**clean_environment(), **launch, "RANK": str(host)}
            with lab.inside(host):
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "bagua.cli.net_bench", *SMALL_RUN, "--backends", "plugin,bare,raw"],
                        env=variables,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                        text=True,
                    )
                )
        (code, output, errors), _ = finish(processes)
    assert code == 0, errors
    assert "on 2 hosts over eth0,eth1 (10.77.0.1)" in output
    assert "devices eth0+eth1" in output
    assert "bare and raw: over 10.77.0.1 alone; the plugin's device is eth0+eth1" in output
