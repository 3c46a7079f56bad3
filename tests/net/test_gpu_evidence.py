"""tools/measure/gpu_evidence.sh without GPUs: a python3 of ours notes what each part would run and leaves results."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.processes import is_alive, wait_until

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

import measure.compression
import measure.convergence.tool
import measure.core.tool
import measure.memory.tool
import measure.networks
import sweep.options

from bagua.net.bench.nccl_ab.options import parse_options

Run = Callable[..., tuple[subprocess.CompletedProcess[str], list[list[str]]]]

PLAYED = """#!/usr/bin/env bash
printf '%q ' "$@" >>"$NOTES"
echo >>"$NOTES"
while [ $# -gt 0 ]; do
  if [ "$1" = --output-dir ]; then
    mkdir -p "$2"
    echo '{}' >"$2/nccl.json"
    echo picture >"$2/nccl.png"
  fi
  shift
done
echo "the table"
if [ -n "${PLAYED_S:-}" ]; then
  echo $$ >"$NOTES.running"
  sleep "$PLAYED_S"
fi
exit "${PLAYED_EXIT:-0}"
"""


@pytest.fixture
def evidence(repository: Path, tmp_path: Path) -> Run:
    played = tmp_path / "bin" / "python3"
    played.parent.mkdir()
    played.write_text(PLAYED)
    played.chmod(0o755)
    notes = tmp_path / "notes"
    notes.touch()

    def run(*parts: str, **variables: str) -> tuple[subprocess.CompletedProcess[str], list[list[str]]]:
        environment = {**os.environ, **variables, "NOTES": str(notes), "TMPDIR": str(tmp_path)}
        environment["PATH"] = f"{played.parent}:{environment['PATH']}"
        done = subprocess.run(
            ["bash", str(repository / "tools" / "measure" / "gpu_evidence.sh"), str(tmp_path / "out"), "4", *parts],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            stdin=subprocess.DEVNULL,
        )
        return done, [shlex.split(line) for line in notes.read_text().splitlines()]

    return run


def nccl_words(command: list[str]) -> list[str]:
    assert command[:3] == ["-m", "bagua.cli.net_bench", "--nccl"]
    return command[3:]


def measure_words(command: list[str], tool: str) -> list[str]:
    assert command[:3] == ["-m", "measure", tool]
    for option in ("--json", "--output-dir", "--trace"):  # the script's folder is gone
        if option in command:
            Path(command[command.index(option) + 1]).parent.mkdir(parents=True, exist_ok=True)
    return command[3:]


def test_every_part_of_best_is_a_command_that_the_benchmark_takes(evidence: Run, tmp_path: Path) -> None:
    done, commands = evidence("best")
    assert done.returncode == 0, done.stderr
    library = tmp_path / "libnccl-net.so"
    library.write_bytes(b"")
    collectives = []
    for command in commands[:-1]:
        options = parse_options([*nccl_words(command), "--library", str(library)])
        collectives += options.collectives
        assert len(options.backends) == 11
        assert (options.ranks, options.sizes[0], options.sizes[-1]) == (4, 8, 1 << 30)
        assert options.time_limit_s == 110
    assert collectives == ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_recv"]
    given = measure.networks.parse_options(measure_words(commands[-1], "networks"), gpus=lambda: 4)
    assert len(measure.networks.backends_of(given)) == 10
    assert (given.ranks, given.model, given.dtype) == (4, ("vgg16",), "bf16")
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"best_all_reduce-4.json", "best_send_recv-4.png", "best_ddp-4.json"} <= written
    assert any(name.startswith("logs-4-best_all_reduce+") for name in written)


def test_the_parts_of_training_are_commands_that_the_tools_take(evidence: Run) -> None:
    def gpus() -> int:
        return 4

    done, commands = evidence(
        *("core", "core_tcp", "algorithms", "sweep", "sweep_delay", "convergence", "memory", "kernels"),
        CORE_OPTIONS="--rounds 1",
        SWEEP_OPTIONS="--rounds 1",
        CONVERGENCE_OPTIONS="--tasks digits",
        KERNEL_OPTIONS="--rounds 3",
    )
    assert done.returncode == 0, done.stderr
    for command in commands:  # the tools refuse to write into a folder that is not there, and the script's are gone
        Path(command[command.index("--json") + 1]).parent.mkdir(parents=True, exist_ok=True)
    core, core_tcp, algorithms, networks, delays, convergence, memory, kernels = commands
    for command, network in ((core, "nvlink"), (core_tcp, "tcp"), (algorithms, "tcp")):
        options = measure.core.tool.parse_options(measure_words(command, "core"), gpus=gpus)
        assert (options.ranks, options.network, options.rounds) == (4, network, 1)
    for command in (networks, delays):
        assert command[:2] == ["-m", "sweep"]
        planned = sweep.options.parse_options(command[2:], gpus=gpus)
        assert (planned.ranks, planned.device, planned.rounds) == (4, "cuda", 1)
    words = measure_words(convergence, "convergence")
    assert measure.convergence.tool.parse_options(words, gpus=gpus).tasks == ("digits",)
    assert measure.memory.tool.parse_options(measure_words(memory, "memory"), gpus=gpus).ranks == 4
    words = ["--device", "cpu", *measure_words(kernels, "compression")]
    assert measure.compression.parse_options(words).rounds == 3


def test_ranks_share_gpus_where_they_can(evidence: Run, tmp_path: Path) -> None:
    def gpus() -> int:
        return 1

    parts = ("collectives", "core_tcp", "algorithms", "sweep", "sweep_delay", "convergence", "memory")
    done, commands = evidence(*parts, SHARE_GPUS="1")
    assert done.returncode == 0, done.stderr
    for command in commands:
        if "--json" in command:  # the folder was the script's, and is gone
            Path(command[command.index("--json") + 1]).parent.mkdir(parents=True, exist_ok=True)
    collectives, core_tcp, algorithms, networks, delays, convergence, memory = commands
    library = tmp_path / "libnccl-net.so"
    library.write_bytes(b"")
    asked = parse_options([*nccl_words(collectives), "--library", str(library)])
    assert (asked.share_gpus, asked.ranks, any(one.shared_memory for one in asked.backends)) == (True, 4, False)
    core, memory_options = measure.core.tool.parse_options, measure.memory.tool.parse_options
    sharing = [core(measure_words(one, "core"), gpus=gpus).sharing for one in (core_tcp, algorithms)]
    sharing += [sweep.options.parse_options(one[2:], gpus=gpus).sharing for one in (networks, delays)]
    words = measure_words(convergence, "convergence")
    sharing.append(measure.convergence.tool.parse_options(words, gpus=gpus).sharing)
    sharing.append(memory_options(measure_words(memory, "memory"), gpus=gpus).sharing)
    assert [one is not None and one.gpus for one in sharing] == [1] * 6
    _, unshared = evidence("algorithms")
    assert "--share-gpus" not in unshared[-1]


def test_the_parts_of_tests_run_files_that_exist(evidence: Run) -> None:
    done, commands = evidence("tests", "kernel_tests", TEST_OPTIONS="-n 4")
    assert done.returncode == 0, done.stderr
    for command in commands:
        assert command[:2] == ["-m", "pytest"]
        assert Path(command[-3]).exists()
        assert command[-2:] == ["-n", "4"]


def test_the_part_that_runs_ends_with_the_script(evidence: Run, repository: Path, tmp_path: Path) -> None:
    evidence("memory")  # makes the played python3
    environment = {**os.environ, "NOTES": str(tmp_path / "notes"), "TMPDIR": str(tmp_path), "PLAYED_S": "300"}
    environment["PATH"] = f"{tmp_path / 'bin'}:{environment['PATH']}"
    script = repository / "tools" / "measure" / "gpu_evidence.sh"
    running = tmp_path / "notes.running"
    with subprocess.Popen(["bash", str(script), str(tmp_path / "out"), "4", "memory"], env=environment) as started:
        wait_until(lambda: running.exists() and running.read_text().endswith("\n"), "the part", 30)
        started.terminate()
        assert started.wait(30) == 143
    wait_until(lambda: not is_alive(int(running.read_text())), "the part ends", 30)


def test_options_of_the_caller_come_last(evidence: Run) -> None:
    _, commands = evidence(
        "best_all_gather", "ddp", AB_OPTIONS="--sizes 8,1M", DDP_OPTIONS="--steps 3", SECONDS_BEST="30"
    )
    assert commands[0][-2:] == ["--sizes", "8,1M"]
    assert commands[0][commands[0].index("--time-limit") + 1] == "30"
    assert commands[1][-2:] == ["--steps", "3"]


def test_a_part_that_fails_is_remembered_and_the_others_run(evidence: Run) -> None:
    done, commands = evidence("all_reduce", "collectives", PLAYED_EXIT="1")
    assert done.returncode == 1
    assert len(commands) == 2
    assert "== all_reduce: exit status 1" in done.stdout


@pytest.mark.parametrize("part", ["best_gather", "all-reduce"])
def test_an_unknown_part_is_refused_before_anything_runs(evidence: Run, part: str) -> None:
    done, commands = evidence("all_reduce", part)
    assert done.returncode == 2
    assert f"unknown part {part}" in done.stderr
    assert "best_all_to_all" in done.stderr
    assert commands == []
