"""Whole runs of bagua-net-bench with the fake driver: what is printed and exported, which options are refused, and how
a run ends that fails or is interrupted."""

from __future__ import annotations

import csv
import os
import re
import resource
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.bench_command import SMALL_RUN, Bench, hanging, outside_a_launcher
from support.processes import is_alive, living_pids, wait_until

from bagua.cli import net_bench
from bagua.command_exit import sigterm_as_interrupt
from bagua.net import native
from bagua.net.bench.driver import NetworkPath, choose_path
from bagua.net.bench.errors import BenchError, UsageError
from bagua.net.bench.machine import check_memory
from bagua.net.bench.process_tree import descendants, running, start_command
from bagua.net.bench.processes import DriverProcess, gather
from bagua.net.bench.result_file import ResultFile, read_result
from bagua.net.bench.ring.options import parse_options
from bagua.net.bench.ring.sessions import own_ranks

NATIVE = ["--backends", "plugin,plugin-1,bare,raw", "--raw-streams", "1,2"]
MIB = 1 << 20
SIZES = (1 << 10, 1 << 16, 1 << 22)


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    """A library that takes 1.25 times as long."""
    library = tmp_path / "libslow.so"
    library.write_text("1.25", encoding="utf-8")
    return library


Refused = Callable[..., tuple[int, str, str]]


@pytest.fixture
def refused(bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Runs the command in this process: exit code, output and errors. For what ends before it starts drivers."""
    for name in set(os.environ) - set(outside_a_launcher()):
        monkeypatch.delenv(name)

    def run(*words: str) -> tuple[int, str, str]:
        installed = [] if "--nccl" in words else ["--driver", str(bench.driver), "--library", str(bench.library)]
        try:
            code = net_bench.main([*installed, *words])
        except SystemExit as ended:
            code = int(ended.code or 0)
        return (code, *capsys.readouterr())

    return run


def test_a_run_prints_table_and_summary_and_exports(bench: Bench, slow: Path, tmp_path: Path) -> None:
    json_path, csv_path = tmp_path / "run.json", tmp_path / "run.csv"
    outputs = ["--json", str(json_path), "--csv", str(csv_path)]
    words = [*SMALL_RUN, *NATIVE, "--baseline-library", str(slow), *outputs]
    finished = bench.run(*words, UNRELATED_SECRET="hidden", BAGUA_NET_ENCRYPTION="chacha20")
    assert finished.returncode == 0, finished.stderr
    for told in (
        "ring all-reduce, 2 ranks x 2 channels on one host over lo (127.0.0.1)",
        "BaguaNet, table v12, devices lo, encrypted (ChaCha20-Poly1305)\n",
        "BAGUA_NET_NSTREAMS=1",
        f"encrypted (ChaCha20-Poly1305), {slow}\n",
        "NCCL's own transport does by default; not encrypted\n",
        "\nthe plugin's traffic is encrypted, and bare and raw are not: unset BAGUA_NET_ENCRYPTION",
        # 4 MiB in 10 us + 1 ns a byte; raw moves 8 GB/s over 2 streams, which 2 connections share.
        "raw TCP limit: 8.00 GB/s one way over 2 streams; 2 ring connections share it: busbw 4.00 GB/s",
        "plugin vs bare: busbw at 4 MiB 1.00x (spread 1.00..1.00), p50 time at 1 KiB 1.00x",
        "plugin vs baseline: busbw at 4 MiB 1.25x (spread 1.25..1.25), p50 time at 1 KiB 0.80x",
        "data: every byte of every size correct",
    ):
        assert told in finished.stdout
    result = read_result(json_path)
    check_figures(result)
    assert result.command.endswith(" ".join(outputs))
    assert result.parameters["environment"]["BAGUA_NET_ENCRYPTION"] == "chacha20"
    assert "UNRELATED_SECRET" not in json_path.read_text()
    lines = [line for line in csv_path.read_text().splitlines() if not line.startswith("#")]
    table = list(csv.DictReader(lines))
    assert len(table) == len(result.figures)
    assert {"backend": "plugin", "metric": "time", "unit": "us", "size_bytes": "1024"}.items() <= table[0].items()


def check_figures(result: ResultFile) -> None:
    """By hand, from what the fake driver takes."""
    assert list(result.parameters["backends"]) == ["plugin", "baseline", "plugin-1", "bare"]
    times = {(one.case["backend"], one.case["size_bytes"]) for one in result.select("time")}
    # Raw TCP has no small messages; the ring backends have every size.
    ring = {(n, s) for n in ("plugin", "baseline", "plugin_one_stream", "bare") for s in SIZES}
    assert times == ring | {("raw", 4 * MIB)}
    large = {"backend": "plugin", "size_bytes": 4 * MIB, "ranks": 2}
    busbw = result.find("busbw", **large).median
    assert busbw == pytest.approx(4 * MIB / (10e3 + 4 * MIB))
    assert result.find("of_raw", **large).median == pytest.approx(2 * busbw / 8.0 * 100)
    # Two ranks of 0.5 ns a byte, for 2 (W - 1) = 2 bytes moved a byte.
    assert result.find("cpu", **large).median == pytest.approx(0.5)
    assert result.select("latency_p50", **large) == []
    assert result.find("latency_p50", backend="bare", size_bytes=1 << 10).median == pytest.approx(11.024)
    assert result.find("limit", backend="raw", streams=2).median == pytest.approx(8.0)
    for size in SIZES:
        time = result.find("time", backend="plugin", size_bytes=size)
        assert (time.low, time.median, time.high) == pytest.approx((10 + size / 1000,) * 3)
        for metric, baseline, ratio in (
            ("speedup", "baseline", 1.25),
            ("cpu_ratio", "baseline", 0.8),
            ("speedup", "bare", 1.0),
        ):
            figure = result.find(metric, backend="plugin", baseline=baseline, size_bytes=size)
            assert (figure.low, figure.median, figure.high) == pytest.approx((ratio,) * 3)
    assert (result.parameters["ranks"], result.notes[1:]) == (2, ())  # the note is of encryption


@pytest.mark.parametrize("stdout", ["/dev/full", "/dev/null"])
def test_the_files_are_written_also_if_the_table_cannot_be(bench: Bench, stdout: str, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    words = bench.command(*SMALL_RUN, "--backends", "bare", "--json", str(path))
    with Path(stdout).open("w", encoding="utf-8") as full:
        ended = subprocess.run(
            words, env=bench.environment(), stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert ended.returncode == (1 if stdout == "/dev/full" else 0), ended.stderr
    assert ("the output cannot be written (No space left on device)" in ended.stderr) == (stdout == "/dev/full")
    assert read_result(path).figures


def test_more_ranks_and_sizes_that_are_too_small_for_raw(bench: Bench) -> None:
    words = ["-b", "8", "-e", "64", "-n", "2", "--repeats", "1", "--ranks", "4", "--channels", "3"]
    finished = bench.run(*words, *NATIVE)
    assert finished.returncode == 0, finished.stderr
    for told in ("4 ranks x 3 channels", "4 ring connections share it", "raw TCP limit: 8.00 GB/s", "64 MiB  raw x2"):
        assert told in finished.stdout


def test_the_time_budget_is_kept(bench: Bench) -> None:
    finished = bench.run("-b", "1M", "-e", "4M", "--time-budget", "60", "--backends", "bare")
    assert finished.returncode == 0, finished.stderr
    # The fake driver answers at once whatever it is asked for: the plan is what is tested. Starting took some of it.
    planned = re.search(r"about (\d+) s for 7 repetitions of 3 sizes by 1 backend", finished.stderr)
    assert planned is not None, finished.stderr
    assert 1 <= int(planned.group(1)) <= 60


# --- data and drivers that fail ---------------------------------------------------------------------------------------


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
    unverified = bench.run(*SMALL_RUN, *NATIVE, "--no-verify", fault=fault)
    assert unverified.returncode == 0
    assert "data: not verified" in unverified.stdout


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"at": "start", "do": "error", "rank": 1, "transport": "plugin"}, "rank 1 failed while starting: injected"),
        ({"at": "start", "do": "error", "rank": 1, "library": "libslow.so"}, "baseline rank 1 failed while starting"),
        ({"at": "connect", "do": "exit", "transport": "bare", "rank": 0}, "bare rank 0 (pid "),
        ({"at": "run", "do": "kill", "transport": "plugin", "rank": 1}, "run out of memory: lower -e/--maxbytes"),
        ({"at": "run", "do": "kill", "transport": "server"}, "raw x1 server (rank 1)"),
        ({"at": "run", "do": "hang", "transport": "bare", "rank": 1}, "no answer from bare rank 1 within 2 s while at"),
        ({"at": "run", "do": "short", "transport": "bare", "rank": 1}, "reports 0 iterations of 65537 B instead of 1"),
        ({"at": "run", "do": "garbage", "transport": "bare"}, "sent b'this is no JSON', which is no JSON object"),
        ({"at": "run", "do": "other_event", "transport": "bare"}, "'surprise' where 'result' was expected"),
    ],
    ids=lambda value: f"{value['do']} at {value['at']}" if isinstance(value, dict) else "",
)
def test_a_failing_driver_ends_the_run_and_leaves_nothing(
    bench: Bench, slow: Path, fault: dict[str, object], message: str
) -> None:
    words = ["-b", "65537", "-e", "1M", "-f", "16", "-n", "2", "--baseline-library", str(slow)]
    finished = bench.run(*words, "--timeout", "2" if fault["do"] == "hang" else "60", *NATIVE, fault=fault)
    assert finished.returncode == 1
    assert message in finished.stderr
    assert "Traceback" not in finished.stderr


def test_a_driver_that_ignores_quit_is_killed(bench: Bench) -> None:
    """Its round has ended; the processes of the next one have to find the CPUs free."""
    command = [str(bench.driver), "ring", "--transport", "bare", "--rank", "0", "--nranks", "2", "--channels", "1"]
    driver = DriverProcess("bare rank 0", command, bench.environment({"at": "quit", "do": "hang"}))
    gather([driver], "listening", 60, "starting")
    driver.close()
    assert not is_alive(driver.pid)
    with pytest.raises(BenchError, match=r"'/no/driver' cannot be started .No such file.*reinstall bagua"):
        DriverProcess("bare rank 0", ["/no/driver"], {})
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (max(int(one.name) for one in Path("/proc/self/fd").iterdir()) + 2, hard)
    )
    try:
        with pytest.raises(BenchError, match=r"cannot be started .Too many open files.*ulimit -n"):
            DriverProcess("bare rank 0", command, {})
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(("level", "shown"), [("", ""), ("info", "NET/BaguaNet: active\n")])
def test_the_log_of_a_driver_is_shown_when_asked_for(
    level: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["/bin/sh", "-c", "echo NET/BaguaNet: active >&2; read quit"]
    DriverProcess("plugin rank 0", command, {"BAGUA_DRIVER_LOG": level}).close()
    assert capsys.readouterr().err == shown


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_ended_leaves_nothing_behind(bench: Bench, number: signal.Signals) -> None:
    """Neither drivers nor the processes of --busy-per-cpu, which compute until then."""
    fault = {"at": "run", "do": "hang", "transport": "bare"}
    command = bench.command(*SMALL_RUN, "--backends", "plugin,bare", "--busy-per-cpu", "1")
    process = subprocess.Popen(command, env=bench.environment(fault), stderr=subprocess.PIPE, text=True)
    wait_until(lambda: len(living_pids(bench.pids)) == 4, "the start of four drivers")
    wait_until(lambda: hanging(bench.pids) == 2, "the run of the two that hang")
    busy = set(descendants(process.pid)) - set(living_pids(bench.pids))
    assert len(busy) == len(os.sched_getaffinity(0))
    tenth = os.sysconf("SC_CLK_TCK") // 10
    wait_until(lambda: all(cpu_ticks(pid) >= tenth for pid in busy), "0.1 s of CPU time of each")
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    if number != signal.SIGKILL:
        assert process.returncode == 130
        assert "interrupted; all drivers are ended" in errors
        assert "Traceback" not in errors
        assert living_pids(bench.pids) == []
    wait_until(lambda: not any(map(is_alive, [*busy, *living_pids(bench.pids)])), "the end of every process")


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_command_is_being_started_ends_it(number: signal.Signals) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        started.append(start_command(["sleep", "600"], os.environ, RuntimeError))
        signal.raise_signal(number)
        return started[0]

    with pytest.raises(KeyboardInterrupt), sigterm_as_interrupt(), running(start):
        pass
    assert started[0].poll() is not None


# --- options and settings ---------------------------------------------------------------------------------------------


def test_defaults_and_spellings() -> None:
    options = parse_options([])
    assert (options.sizes[0], options.sizes[-1]) == (8, 256 * MIB)
    assert options.backends == ("plugin", "plugin-1", "bare", "raw")
    assert (options.verify, options.time_budget_s <= 170) == (True, True)
    short = parse_options(["-b", "1K", "-e", "1M", "-f", "4", "-n", "20", "-w", "3"])
    words = ["--minbytes", "1KiB", "--maxbytes", "1 MiB", "--stepfactor", "4", "--iters", "20", "--warmup_iters", "3"]
    assert parse_options(words) == short
    assert short.sizes == (1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, MIB)
    assert parse_options(["-b", "1.5k", "-e", "7000"]).sizes == (1536, 3072, 6144)
    assert parse_options(["--quick"]).sizes == (8, 1 << 10, 64 << 10, MIB, 16 * MIB)
    quick = parse_options(["--quick", "-b", "4M", "-e", "16M", "--repeats", "9"])
    assert (quick.sizes, quick.repeats) == ((4 * MIB, 8 * MIB, 16 * MIB), 9)
    assert parse_options(["-b", "512M"]).sizes == (512 * MIB,)
    lists = parse_options(["--backends", "bare, raw,bare", "--raw-streams", "4,1,4"])
    assert (lists.backends, lists.raw_streams) == (("bare", "raw"), (1, 4))


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["-b", "ten"], 2, "argument -b/--minbytes: size 'ten' is not a number"),
        (["-b", "0.3K"], 2, "size '0.3K' is 307.2 bytes; give a whole number of bytes"),
        (["-b", "1025G"], 2, "size '1025G' is 1100585369600 bytes; the limit is 1099511627776 bytes"),
        (["-b", "0"], 2, "smallest size 0 B is below the limit of 1 B; raise -b"),
        (["-b", "1M", "-e", "1K"], 2, "1 MiB is above the largest size 1 KiB; lower -b"),
        (["-f", "two"], 2, "'two' is not an integer; give one in 2..1024"),
        (["-n", "5", "--time-budget", "9"], 2, "not allowed with argument"),
        (["--time-budget", "nan"], 2, "outside 1..86400"),
        (["--backends", "plugin,nccl"], 2, "unknown backend 'nccl'; give a comma-separated list of plugin, plugin-1"),
        (["--raw-streams", "2", "--backends", "bare"], 2, "without the backend raw"),
        (["--baseline-library", "x.so", "--backends", "bare"], 2, "compared with; add plugin to --backends"),
        (["--min", "8"], 2, "unrecognized arguments: --min"),
        (["--nccl", "--ranks", "0"], 2, "0 is outside 2..128"),
        (["--json", "/no/such/run.json"], 2, "--json '/no/such/run.json': folder '/no/such' does not exist; create it"),
        (["--csv", "/proc"], 2, "--csv '/proc' is a directory"),
        (["--csv", "/proc/version"], 2, "--csv '/proc/version' cannot be written ("),
        (["--interface", "eth99"], 2, "--interface 'eth99' does not exist on this host; it has "),
        (["--address", "203.0.113.9"], 2, "--address '203.0.113.9' is no address of this host"),
        (["--library", "/no/libnccl-net.so"], 1, "'/no/libnccl-net.so' does not exist; name a built libnccl-net.so"),
        (["--baseline-library", "/no/old.so"], 1, "the baseline's library '/no/old.so' does not exist; name a libnccl"),
        (["--baseline-library", "/"], 1, "the baseline's library '/' is no file"),
        (["--driver", "/no/driver"], 1, "load driver '/no/driver' does not exist"),
        (["--driver", "/proc/version"], 1, "may not be executed; run chmod +x"),
        (["-e", "1024G", "-b", "1024G"], 1, "lower -e/--maxbytes"),
    ],
)
def test_what_cannot_start_says_why(words: list[str], code: int, message: str, refused: Refused) -> None:
    """In one line: argparse's own usage, of ten lines, would hide the one that matters."""
    ended, output, errors = refused(*words)
    assert (ended, output) == (code, "")
    (line,) = errors.splitlines()
    program = "bagua-net-bench --nccl" if "--nccl" in words else "bagua-net-bench"
    assert line.startswith(f"{program}: error: ")
    assert message in line
    assert line.endswith(f" (all options: {program} --help)") == (code == 2)


def test_no_output_overwrites_another(refused: Refused, tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    assert "both name '" in refused("--json", path, "--csv", f"{tmp_path}/./run")[2]
    assert "'; give each a file of its own" in refused("--json", path, "--csv", path)[2]
    kept = tmp_path / "kept.json"
    kept.write_text("before")
    refused("--json", str(kept), "--csv", "/dev/null", "--interface", "eth99")
    assert kept.read_text() == "before", "a run that does not start"


def test_memory_is_checked_before_the_run() -> None:
    available = "MemTotal:       8000000 kB\nMemAvailable:   2097152 kB\n"
    check_memory(256 * MIB, 2, 3, available)
    with pytest.raises(BenchError, match=r"4 ranks and 3 backends needs 4 GiB.*2 GiB are available; lower"):
        check_memory(256 * MIB, 4, 3, available)
    check_memory(1 << 40, 64, 4, "an unknown format")


def test_settings_are_checked_before_a_driver_starts(bench: Bench) -> None:
    misspelt = {"BAGUA_NET_NSTREAM": "4", "BAGUA_LOG_LEVL": "info"}
    told = bench.run("--version", **misspelt, BAGUA_NET_TRACE="/no-such-folder/trace.json").stderr
    for name, meant in (("BAGUA_NET_NSTREAM", "BAGUA_NET_NSTREAMS"), ("BAGUA_LOG_LEVL", "BAGUA_LOG_LEVEL")):
        assert told.count(f"{name} is not") == 1, told
        assert f"Did you mean {meant}?" in told
    assert told.count("the folder /no-such-folder does not exist") == 1, told
    for folder in ("/tmp", "/scratch/%h"):
        assert bench.run("--version", BAGUA_NET_TRACE=f"{folder}/trace.json").stderr == ""
    bad = {"BAGUA_NET_RAILS": "foo"}
    with pytest.raises(BenchError, match=r"\ABAGUA_NET_RAILS=foo: must be an integer from 1 to 16"):
        own_ranks(parse_options([]), bad)
    with pytest.raises(BenchError, match=r"\ABAGUA_NET_SECRET_FILE=/none: the file cannot be opened"):
        own_ranks(parse_options([]), {"BAGUA_NET_SECRET_FILE": "/none"})
    own_ranks(parse_options(["--backends", "bare"]), bad).close(failed=False)  # does not read them
    own_ranks(parse_options([]), {"ENABLE_BAGUA_NET": "maybe"}).close(failed=False)  # drivers do not get it


HOST = {"lo": ["127.0.0.1", "::1"], "eth0": ["10.0.0.5", "fd00::5"], "down0": []}
JOINS = {"BAGUA_NET_JOIN_NICS": "eth0+eth1"}


@pytest.mark.parametrize(
    ("options", "variables", "default", "path"),
    [
        ({}, {}, "127.0.0.1", ("127.0.0.1", "lo")),
        ({}, {}, "10.0.0.5", ("10.0.0.5", "eth0")),
        ({}, JOINS, "10.0.0.5", ("10.0.0.5", "eth0,eth1")),
        ({}, JOINS, "127.0.0.1", ("127.0.0.1", "lo")),
        ({"interface": "eth0"}, JOINS, "127.0.0.1", ("10.0.0.5", "eth0")),
        ({}, {"NCCL_SOCKET_IFNAME": "eth,ib"}, "127.0.0.1", ("127.0.0.1", "")),
        ({"interface": "eth0"}, {"NCCL_SOCKET_IFNAME": "ib"}, "127.0.0.1", ("10.0.0.5", "eth0")),
        ({"address": "fd00::5"}, {}, "127.0.0.1", ("fd00::5", "eth0")),
        ({"address": "127.0.0.7"}, {}, "127.0.0.1", ("127.0.0.7", "lo")),
        ({"interface": "down0"}, {}, "127.0.0.1", "--interface 'down0' has no address"),
        ({"address": "10.0.0.5", "interface": "lo"}, {}, "127.0.0.1", "'10.0.0.5' is not on --interface 'lo'"),
        ({"address": "eth0"}, {}, "127.0.0.1", "--address 'eth0' is no IP address"),
    ],
)
def test_one_path_for_every_backend(
    options: dict[str, str],
    variables: dict[str, str],
    default: str,
    path: tuple[str, str] | str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native, "nic_groups", lambda _: native.NicGroups([["eth0", "eth1"], ["eth2"]], []))

    def chosen() -> object:
        given = {"address": None, "interface": None, **options}
        return choose_path(**given, default_address=default, environment=variables, addresses=HOST)

    if isinstance(path, tuple):
        assert chosen() == NetworkPath(*path)
    else:
        with pytest.raises(UsageError, match=path):
            chosen()
