"""`bagua-net-bench --nccl` with real processes and real collectives: gloo on CPUs stands in for NCCL on GPUs, so that
starting, joining, turns, verification, failures, launchers and exports run wherever the tests do."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.bench_command import outside_a_launcher
from support.processes import is_alive, wait_until

from bagua.cli.net_bench import main
from bagua.net.bench.result_file import read_result

pytest.importorskip("torch", reason="needs PyTorch: the workers are its processes")

DEADLINE_S = 240.0
STAND_IN = ["--backend", "gloo", "--device", "cpu"]


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """gloo never opens it; that it exists is checked before the run."""
    path = tmp_path / "libnccl-net.so"
    path.write_bytes(b"")
    return path


def command(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "bagua.cli.net_bench", "--nccl", *STAND_IN, *(str(word) for word in words)]


def workers_of(pid: int) -> list[int]:
    children = [int(child) for task in Path(f"/proc/{pid}/task").glob("*") for child in _children(task)]
    return [child for child in children if b"nccl_ab.rank" in _command_line(child)]


def _children(task: Path) -> list[str]:
    try:
        return (task / "children").read_text().split()
    except OSError:
        return []


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.deep
@pytest.mark.timeout(300)
def test_all_collectives_and_settings_run_and_are_verified_and_exported(tmp_path: Path, library: Path) -> None:
    out = tmp_path / "out"
    words = ["-n", "3", "-w", "1", "--repeats", "2", "--tuned", "4x1x8", "--ranks", "2", "--collectives", "all"]
    words = command("--library", library, *words, "--sizes", "4K,6", "--output-dir", out)
    done = subprocess.run(words, env=outside_a_launcher(), capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "2 repetitions of 12 sizes by 3 backends" in done.stderr, "how long it will take"
    assert "gloo on CPUs stands in for NCCL" in done.stdout
    result = read_result(out / "nccl.json")
    times = result.select("time")
    own = {"nccl": "default", "nccl_t4s1_8ch": "t4s1 8ch"}
    assert {one.case["backend"] for one in times} == {*own, "nccl_tuned_best", "plugin"}
    assert {one.case["collective"] for one in times} == {
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "send_recv",
        "broadcast",
    }
    assert all(one.median > 0 for one in (*times, *result.select("latency_p99")))
    # 6 B of bfloat16 cannot be cut for 2 ranks: what ran is what is reported.
    assert {one.case["size_bytes"] for one in result.select("time", collective="all_to_all")} == {8, 4096}
    assert {(one.case["ranks"], one.case["gpus"]) for one in times} == {(2, 0)}
    assert len(times) == 48
    for best in result.select("time", backend="nccl_tuned_best", collective="all_reduce"):
        size = {"collective": "all_reduce", "size_bytes": best.case["size_bytes"]}
        medians = {own[name]: result.find("time", backend=name, **size).median for name in own}
        assert best.case["setting"] == min(medians, key=lambda name: medians[name])
        assert result.find("speedup", baseline="nccl_tuned_best", **size).repetitions == 2
    assert result.parameters["tcp_only"] is True
    assert not any(note.startswith(("ERROR", "WRONG DATA")) for note in result.notes)
    with (out / "nccl.csv").open() as file:
        table = list(csv.DictReader(line for line in file if not line.startswith("#")))
    assert len(table) == len(result.figures)


@pytest.mark.deep
@pytest.mark.timeout(300)
def test_a_killed_worker_is_reported_at_once_and_the_other_backend_goes_on(tmp_path: Path, library: Path) -> None:
    result = tmp_path / "run.json"
    words = ["--ranks", "2", "-b", "1M", "-e", "1M", "-n", "4", "-w", "1", "--repeats", "60", "--tuned", "none"]
    process = subprocess.Popen(
        command("--library", library, *words, "--json", result),
        env=outside_a_launcher(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if "repetition" in line:
                break
        (victim,) = (
            pid
            for pid in workers_of(process.pid)
            if b"--rank=1" in _command_line(pid) and b"NCCL_NET_PLUGIN" in Path(f"/proc/{pid}/environ").read_bytes()
        )
        os.kill(victim, signal.SIGKILL)
        output, _ = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 1
    found = read_result(result)
    (error,) = (note for note in found.notes if note.startswith("ERROR: "))
    assert "bagua-net" in error
    assert len(found.select("time", backend="nccl")) == 1
    assert error in output


@pytest.mark.timeout(300)
def test_no_worker_outlives_the_command(library: Path) -> None:
    process = subprocess.Popen(
        command("--library", library, "--ranks", "2", "--tuned", "none", "--sizes", "8", "--repeats", "1000"),
        env=outside_a_launcher(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: len(workers_of(process.pid)) == 4, "four workers")
        workers = workers_of(process.pid)
        # However many GPUs there are: the plugin shares the CPUs out among the ranks.
        assert all(b"\0LOCAL_WORLD_SIZE=2\0" in Path(f"/proc/{pid}/environ").read_bytes() for pid in workers)
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: not any(is_alive(pid) for pid in workers), "the end of all workers")


def test_what_cannot_start_says_why(
    library: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process: it ends before it starts workers."""
    for name in set(os.environ) - set(outside_a_launcher()):
        monkeypatch.delenv(name)

    def ended(*words: str) -> tuple[int, str, str]:
        try:
            code = main(["--nccl", *words])
        except SystemExit as ended:
            code = int(ended.code or 0)
        return (code, *capsys.readouterr())

    code, output, _ = ended("--help")
    assert (code, "--collectives" in output, "gloo" in output) == (0, True, False), "the stand-in is hidden"
    assert " d_recv" not in output, "a list without blanks is broken within a name"
    stand_in = [*STAND_IN, "--library", str(library)]
    for words, expected, said in (
        (["-b", "1M", "-e", "8"], 2, "smallest size 1 MiB is above the largest size 8 B"),
        (["--sizes", "8,x"], 2, "size 'x' is not a number"),
        (["--sizes", "8,0"], 2, "size 0 in '8,0' is below the limit of 1 B"),
        (["--collectives", "all_reduce,gather"], 2, "unknown collective 'gather'"),
        (["--tuned", "99x1"], 2, "99 threads is outside NCCL's 1..16"),
        (["--variant", "a"], 2, "NAME:VARIABLE=VALUE"),
        (["--ranks", "1"], 2, "1 is outside 2..128"),
        (["--time-limit", "0"], 2, "0 is outside 1.0..86400.0"),
        (["--without-plugin", "--tuned", "none"], 2, "a comparison needs two"),
        (["--json", "/nonexistent/run.json"], 2, "folder '/nonexistent' does not exist"),
        (["--library", "/nonexistent/libnccl-net.so"], 1, "'/nonexistent/libnccl-net.so' does not exist"),
        (["--backend", "nccl"], 2, "belong together"),
    ):
        code, _, errors = ended(*stand_in, *words)
        assert code == expected, errors
        assert said in errors
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    code, _, errors = ended(*stand_in, "--ranks", "3")
    assert (code, "--ranks 3, but torchrun started 2 ranks" in errors) == (2, True), errors
