"""Whole runs of the command against the fake driver: what is printed, exported, and what failures leave behind."""

from __future__ import annotations

import csv
import re
import signal
import subprocess
from pathlib import Path

import pytest
from support.bench_command import SMALL_RUN, Bench, hanging
from support.processes import living_pids, wait_until

from bagua.net.bench.result_file import read_result

NATIVE = ["--backends", "plugin,plugin-1,bare,raw", "--raw-streams", "1,2"]


def test_a_run_prints_table_and_summary_and_exports(bench: Bench, tmp_path: Path) -> None:
    json_path, csv_path = tmp_path / "run.json", tmp_path / "run.csv"
    finished = bench.run(*SMALL_RUN, *NATIVE, "--json", str(json_path), "--csv", str(csv_path))
    assert finished.returncode == 0, finished.stderr
    assert "ring all-reduce, 2 ranks x 2 channels on one host over lo (127.0.0.1)" in finished.stdout
    assert "BaguaNet, table v12, devices lo, BAGUA_NET_NSTREAMS=1" in finished.stdout
    # 4 MiB in 10 us + 1 ns a byte; raw moves 8 GB/s over 2 streams, which 2 connections share.
    assert (
        "raw TCP limit: 8.00 GB/s one way over 2 streams; 2 ring connections share it: busbw 4.00 GB/s"
        in finished.stdout
    )
    assert "plugin vs bare: busbw at 4 MiB 1.00x (spread 1.00..1.00), p50 time at 1 KiB 1.00x" in finished.stdout
    assert "data: every byte of every size correct" in finished.stdout

    result = read_result(json_path)
    sizes = (1 << 10, 1 << 16, 1 << 22)
    times = {(one.case["backend"], one.case["size_bytes"]) for one in result.select("time")}
    # Raw TCP has no small messages; the ring backends have every size.
    assert times == {(n, s) for n in ("plugin", "plugin_one_stream", "bare") for s in sizes} | {("raw", 1 << 22)}
    large = {"backend": "plugin", "size_bytes": 1 << 22, "ranks": 2}
    assert result.find("time", **large).median == pytest.approx(10 + (1 << 22) / 1000)
    busbw = result.find("busbw", **large).median
    assert busbw == pytest.approx((1 << 22) / (10e3 + (1 << 22)))
    assert result.find("of_raw", **large).median == pytest.approx(2 * busbw / 8.0 * 100)
    # Two ranks of 0.5 ns a byte, for 2 (W - 1) = 2 bytes moved a byte.
    assert result.find("cpu", **large).median == pytest.approx(0.5)
    assert result.select("latency_p50", **large) == []
    assert result.find("latency_p50", backend="bare", size_bytes=1 << 10).median == pytest.approx(11.024)
    assert result.find("speedup", baseline="bare", size_bytes=1 << 22).median == pytest.approx(1.0)
    assert result.find("limit", backend="raw", streams=2).median == pytest.approx(8.0)
    assert result.parameters["ranks"] == 2
    assert result.notes == ()

    lines = [line for line in csv_path.read_text().splitlines() if not line.startswith("#")]
    assert len(list(csv.DictReader(lines))) == len(result.figures)


def test_a_misspelt_setting_is_told_with_the_right_name(bench: Bench) -> None:
    environment = {**bench.environment(), "BAGUA_NET_NSTREAM": "4", "BAGUA_LOG_LEVL": "info"}
    told = subprocess.run(
        bench.command("--version"), env=environment, capture_output=True, text=True, timeout=60
    ).stderr
    for name, meant in (("BAGUA_NET_NSTREAM", "BAGUA_NET_NSTREAMS"), ("BAGUA_LOG_LEVL", "BAGUA_LOG_LEVEL")):
        assert told.count(f"{name} is not") == 1, told
        assert f"Did you mean {meant}?" in told


def test_encryption_is_told_with_what_is_not_encrypted(bench: Bench) -> None:
    environment = {**bench.environment(), "BAGUA_NET_ENCRYPTION": "chacha20"}
    command = bench.command(*SMALL_RUN, *NATIVE)
    told = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60).stdout
    assert "table v12, devices lo, encrypted (ChaCha20-Poly1305)\n" in told
    assert "NCCL's own transport does by default; not encrypted\n" in told
    assert "\nthe plugin's traffic is encrypted, and bare and raw are not: unset BAGUA_NET_ENCRYPTION" in told


@pytest.mark.parametrize(("folder", "told"), [("/no-such-folder", 1), ("/tmp", 0), ("/scratch/%h", 0)])
def test_a_trace_that_cannot_be_written_is_told(bench: Bench, folder: str, told: int) -> None:
    environment = {**bench.environment(), "BAGUA_NET_TRACE": f"{folder}/trace.json"}
    said = subprocess.run(
        bench.command("--version"), env=environment, capture_output=True, text=True, timeout=60
    ).stderr
    assert said.count(f"the folder {folder} does not exist") == told, said


def test_more_ranks(bench: Bench) -> None:
    finished = bench.run(*SMALL_RUN, "--backends", "bare,raw", "--ranks", "4", "--channels", "3")
    assert finished.returncode == 0, finished.stderr
    assert "4 ranks x 3 channels" in finished.stdout
    assert "4 ring connections share it" in finished.stdout


def test_small_sizes_alone_still_have_a_limit(bench: Bench) -> None:
    finished = bench.run("-b", "8", "-e", "64", "-n", "2", "--repeats", "1", *NATIVE)
    assert finished.returncode == 0, finished.stderr
    assert "raw TCP limit: 8.00 GB/s" in finished.stdout
    assert "64 MiB  raw x2" in finished.stdout


def test_wrong_data_is_shown_and_fails_the_run(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    fault = {"at": "verify", "do": "wrong", "rank": 1, "transport": "bare"}
    finished = bench.run(*SMALL_RUN, *NATIVE, "--json", str(path), fault=fault)
    assert finished.returncode == 1
    assert "WRONG DATA: bare, all_reduce of 4 MiB: bare rank 1: 3 wrong elements, first: {" in finished.stdout
    assert "WRONG DATA: bare, all_reduce of 4 MiB" in finished.stderr
    assert "every byte" not in finished.stdout
    wrong = read_result(path).notes
    assert wrong
    assert all(note.startswith("WRONG DATA: bare, ") for note in wrong)


def test_unverified_runs_say_so(bench: Bench) -> None:
    fault = {"at": "verify", "do": "wrong"}
    finished = bench.run(*SMALL_RUN, *NATIVE, "--no-verify", fault=fault)
    assert finished.returncode == 0
    assert "data: not verified" in finished.stdout


def test_the_time_budget_is_kept(bench: Bench) -> None:
    finished = bench.run("-b", "1M", "-e", "4M", "--time-budget", "60", "--backends", "bare")
    assert finished.returncode == 0, finished.stderr
    # The fake driver answers at once whatever it is asked for: the plan is what is tested. Starting took some of it.
    planned = re.search(r"about (\d+) s for 7 repetitions of 3 sizes by 1 backend", finished.stderr)
    assert planned is not None, finished.stderr
    assert 1 <= int(planned.group(1)) <= 60


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            {"at": "start", "do": "error", "rank": 1, "transport": "plugin"},
            "plugin rank 1 failed while starting: injected",
        ),
        ({"at": "connect", "do": "exit", "transport": "bare", "rank": 0}, "bare rank 0 (pid "),
        ({"at": "run", "do": "kill", "transport": "plugin", "rank": 1}, "killed by SIGKILL"),
        ({"at": "run", "do": "kill", "transport": "server"}, "raw x1 server (rank 1)"),
        ({"at": "run", "do": "hang", "transport": "bare", "rank": 1}, "no answer from bare rank 1 within 2 s"),
        ({"at": "run", "do": "short", "transport": "bare", "rank": 1}, "reports 0 iterations of 65537 B instead of 1"),
    ],
)
def test_a_failing_driver_ends_the_run_and_leaves_nothing(bench: Bench, fault: dict[str, object], message: str) -> None:
    sizes = ["-b", "65537", "-e", "1M", "-f", "16", "-n", "2"]
    finished = bench.run(*sizes, "--timeout", "2" if fault["do"] == "hang" else "60", *NATIVE, fault=fault)
    assert finished.returncode == 1
    assert message in finished.stderr
    assert "Traceback" not in finished.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            ["--library", "/no/libnccl-net.so"],
            1,
            "'/no/libnccl-net.so' does not exist; name a built libnccl-net.so with",
        ),
        (["--driver", "/no/driver"], 1, "load driver '/no/driver' does not exist"),
        (["--driver", "/proc/version"], 1, "may not be executed; run chmod +x"),
        (["--interface", "eth99"], 2, "--interface 'eth99' does not exist on this host; it has "),
        (["--address", "203.0.113.9"], 2, "--address '203.0.113.9' is no address of this host"),
        (["--backends", "nccl"], 2, "unknown backend 'nccl'"),
        (["--json", "/no/such/run.json"], 2, "'/no/such' does not exist"),
        (["-e", "1024G", "-b", "1024G"], 1, "lower -e/--maxbytes"),
    ],
)
def test_what_cannot_start_says_why(bench: Bench, arguments: list[str], code: int, message: str) -> None:
    finished = bench.run(*NATIVE, *arguments)
    assert finished.returncode == code, finished.stderr
    assert message in finished.stderr
    assert "Traceback" not in finished.stderr
    assert finished.stdout == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_nothing_behind(bench: Bench, number: signal.Signals) -> None:
    fault = {"at": "run", "do": "hang", "transport": "bare"}
    running = subprocess.Popen(
        bench.command(*SMALL_RUN, *NATIVE), env=bench.environment(fault), stderr=subprocess.PIPE, text=True
    )
    # 2 ranks of 3 ring backends, and 2 raw pairs.
    wait_until(lambda: len(living_pids(bench.pids)) == 10, "the start of ten drivers")
    wait_until(lambda: hanging(bench.pids) == 2, "the run of the two that hang")
    running.send_signal(number)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "interrupted; all drivers are ended" in errors
    assert "Traceback" not in errors
    assert living_pids(bench.pids) == []
