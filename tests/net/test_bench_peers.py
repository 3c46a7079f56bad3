"""bagua-net-bench --peers: whole runs against the fake driver, and what its options and failures say."""

from __future__ import annotations

import csv
import signal
import subprocess
from pathlib import Path

import pytest
from support.bench_command import Bench
from support.processes import living_pids, wait_until

from bagua.net.bench.peers.session import Footprint, IdleCost, ThreadUse
from bagua.net.bench.result_file import read_result

SMALL = ["--peers", "1,11", "--messages", "100", "--repeats", "3", "--silence", "0", "--idle", "0.1"]


def test_a_run_prints_both_tables_and_exports(bench: Bench, tmp_path: Path) -> None:
    json_path, csv_path = tmp_path / "run.json", tmp_path / "run.csv"
    finished = bench.run(*SMALL, "--json", str(json_path), "--csv", str(csv_path))
    assert finished.returncode == 0, finished.stderr
    assert "many comms, 2 processes on one host over lo (127.0.0.1), 8 messages under way each way" in finished.stdout
    assert "BaguaNet, table v12, devices lo" in finished.stdout
    assert "a process after the traffic, and 0.1 s of silence" in finished.stdout
    assert "plugin vs bare with 1 comm at 1 MiB: rate 1.00x (spread 1.00..1.00)" in finished.stdout
    assert "idle: no thread woke in 0.1 s" in finished.stdout
    assert "every byte of every verified message correct" in finished.stdout
    assert f"written: {json_path}, {csv_path}" in finished.stdout

    result = read_result(json_path)
    assert {(f.case["backend"], f.case["comms"], f.case["size_bytes"]) for f in result.select("time")} == {
        (name, comms, size) for name in ("plugin", "bare") for comms in (1, 11) for size in SIZES
    }
    one, many = ({"backend": "plugin", "comms": comms, "size_bytes": 1 << 20} for comms in (1, 11))
    # 1 ns a byte, a tenth more with ten comms more.
    assert result.find("busbw", **one).median == pytest.approx(1.0)
    assert result.find("busbw", **many).median == pytest.approx(1 / 1.1)
    assert result.find("rate_ratio", **one).median == 1.0
    assert result.find("rate_ratio", **many).median == pytest.approx(1 / 1.1)
    assert result.find("speedup", baseline="bare", **many).median == pytest.approx(1.0)
    # 0.5 ns a byte of each rank, over the bytes of both ways.
    assert result.find("cpu", **many).median == pytest.approx(0.5)
    assert result.select("idle_memory_per_comm", **one) == []
    expected = {"threads": 3, "descriptors": 32, "tcp_sockets": 22, "idle_memory": 102_400 + 20 * 10_240}
    expected |= {"idle_memory_per_comm": 10_240, "idle_socket_memory_per_comm": 512, "idle_cpu": 0, "idle_wakeups": 0}
    assert {metric: result.find(metric, **many).median for metric in expected} == expected
    assert result.parameters["comms"] == [1, 11]
    assert result.parameters["in_flight"] == 8
    assert result.notes == ()

    lines = [line for line in csv_path.read_text().splitlines() if not line.startswith("#")]
    assert len(list(csv.DictReader(lines))) == len(result.figures)


SIZES = (1 << 20, 64 << 10)


def test_threads_that_wake_while_idle_are_named(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    fault = {"at": "footprint", "do": "wake", "rank": 1, "transport": "plugin"}
    finished = bench.run(*SMALL, "--json", str(path), fault=fault)
    assert finished.returncode == 0, finished.stderr
    assert "WOKE WHILE IDLE: plugin x11: rank 1 thread bagua-net-io0 (7): 4 times in 0.1 s" in finished.stdout
    assert "bagua-net-conn" not in finished.stdout
    assert "no thread woke" not in finished.stdout
    result = read_result(path)
    for name, wakeups, cpu_s in (("bare", 0, 0.0), ("plugin", 4, 0.001)):
        assert {one.median for one in result.select("idle_wakeups", backend=name)} == {wakeups}
        assert result.select("idle_cpu", backend=name)[0].median == pytest.approx(cpu_s)
    assert [note.split(": rank")[0] for note in result.notes] == [
        f"WOKE WHILE IDLE: plugin x{comms}" for comms in (1, 11)
    ]


def footprint(**wakeups: int) -> Footprint:
    others = {index: ThreadUse(name, 0.25, count) for index, (name, count) in enumerate(wakeups.items())}
    return Footprint(len(others) + 1, 3, 0, 0, 0, others)


def test_a_new_thread_answers_for_all_it_did() -> None:
    before, after = footprint(old=3), footprint(old=3, new=0)
    cost = IdleCost.between([before], [after])
    assert cost.cpu_s == 0.25
    assert cost.wakeups == {"rank 0 thread new (1)": 0}


def test_wrong_data_fails_the_run(bench: Bench) -> None:
    fault = {"at": "verify", "do": "wrong", "rank": 1, "transport": "plugin"}
    finished = bench.run(*SMALL, fault=fault)
    assert finished.returncode == 1
    assert (
        "WRONG DATA: plugin x11, send_recv of 64 KiB: plugin x11 rank 1: 3 wrong elements, first in message 5"
        in finished.stdout
    )
    assert "every byte" not in finished.stdout


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"at": "start", "do": "error", "rank": 1, "transport": "bare"}, "bare x1 rank 1 failed while starting"),
        ({"at": "connect", "do": "exit", "rank": 0, "transport": "plugin"}, "plugin x1 rank 0 (pid "),
        ({"at": "run", "do": "kill", "rank": 1, "transport": "plugin"}, "killed by SIGKILL"),
        ({"at": "footprint", "do": "hang", "rank": 0, "transport": "bare"}, "no answer from bare x1 rank 0 within 2 s"),
        ({"at": "run", "do": "short", "rank": 0, "transport": "bare"}, "instead of 22 of 1048576 B"),
    ],
)
def test_a_failing_driver_ends_the_run_and_leaves_nothing(bench: Bench, fault: dict[str, object], message: str) -> None:
    finished = bench.run(*SMALL, "--timeout", "2" if fault["do"] == "hang" else "60", fault=fault)
    assert finished.returncode == 1
    assert message in finished.stderr
    assert "Traceback" not in finished.stderr


def test_an_interrupted_run_leaves_nothing_behind(bench: Bench) -> None:
    fault = {"at": "run", "do": "hang", "transport": "bare"}
    running = subprocess.Popen(bench.command(*SMALL), env=bench.environment(fault), stderr=subprocess.PIPE, text=True)
    wait_until(lambda: len(living_pids(bench.pids)) == 8, "the start of eight drivers", 20)
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=30)
    assert running.returncode == 130
    assert "interrupted; all drivers are ended" in errors
    assert living_pids(bench.pids) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peers", "1,many"], "'many' is not an integer; give one in 1..1024"),
        (["--peers", "--message-sizes", "2G"], "a message of 2 GiB is outside 1 B..1 GiB"),
        (["--peers", "--ranks", "3"], "unrecognized arguments: --ranks 3"),
        (["--peers", "--json", "/no/such/run.json"], "'/no/such' does not exist"),
    ],
)
def test_wrong_options_say_why(bench: Bench, arguments: list[str], message: str) -> None:
    finished = bench.run(*arguments)
    assert finished.returncode == 2
    assert message in finished.stderr
    assert finished.stdout == ""
