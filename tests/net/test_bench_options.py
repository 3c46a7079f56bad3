"""The command line: defaults, nccl-tests spellings, and an error for each wrong value."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from bagua.cli import net_bench
from bagua.net.bench import command_line
from bagua.net.bench.errors import BenchError, UsageError
from bagua.net.bench.machine import check_memory
from bagua.net.bench.ring.options import Options, parse_options

MIB = 1 << 20


def test_defaults_are_the_whole_picture() -> None:
    options = parse_options([])
    assert options.sizes[0] == 8
    assert options.sizes[-1] == 256 * MIB
    assert {1 << 10, 128 * MIB} <= set(options.sizes)
    assert options.backends == ("plugin", "plugin-1", "bare", "raw")
    assert (options.iterations, options.warmup, options.ranks, options.channels) == (None, None, None, 2)
    assert options.verify
    assert options.time_budget_s <= 170


def test_nccl_tests_spellings() -> None:
    short = parse_options(["-b", "1K", "-e", "1M", "-f", "4", "-n", "20", "-w", "3"])
    long = parse_options(
        ["--minbytes", "1K", "--maxbytes", "1M", "--stepfactor", "4", "--iters", "20", "--warmup_iters", "3"]
    )
    assert short == long
    assert short.sizes == (1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, MIB)
    assert (short.iterations, short.warmup) == (20, 3)


def test_quick_gives_way_to_explicit_options() -> None:
    assert parse_options(["--quick"]).sizes == (8, 1 << 10, 64 << 10, MIB, 16 * MIB)
    quick = parse_options(["--quick", "-b", "4M", "-e", "16M", "--repeats", "9"])
    assert quick.sizes == (4 * MIB, 8 * MIB, 16 * MIB)
    assert quick.repeats == 9


def test_a_smallest_size_above_the_default_largest_is_one_size() -> None:
    assert parse_options(["-b", "512M"]).sizes == (512 * MIB,)


def test_backends_and_streams_are_lists() -> None:
    options = parse_options(["--backends", "bare, raw,bare", "--raw-streams", "4,1,4"])
    assert options.backends == ("bare", "raw")
    assert options.raw_streams == (1, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-b", "ten"], "argument -b/--minbytes: size 'ten' is not a number"),
        (["-b", "1M", "-e", "1K"], "1 MiB is above the largest size 1 KiB"),
        (["-f", "two"], "'two' is not an integer; give one in 2..1024"),
        (["-n", "5", "--time-budget", "9"], "not allowed with argument"),
        (["--time-budget", "nan"], "outside 1..86400"),
        (["--backends", "plugin,nccl"], "unknown backend 'nccl'; give a comma-separated list of plugin, plugin-1"),
        (["--raw-streams", "2", "--backends", "bare"], "without the backend raw"),
        (["--min", "8"], "unrecognized arguments: --min"),
    ],
)
def test_wrong_options(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        parse_options(arguments)
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "program"),
    [
        (["--ranks", "0"], "bagua-net-bench"),
        (["--nccl", "--ranks", "0"], "bagua-net-bench --nccl"),
        # Found only after the options were read.
        (["--json", "/nonexistent/x.json"], "bagua-net-bench"),
    ],
)
def test_wrong_options_cost_one_line_that_names_the_help(
    words: list[str], program: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The usage, of ten lines, would hide the one that matters."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # a test must not keep the command's handler
    try:
        code: object = net_bench.main(words)
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{program}: error: ")
    assert line.endswith(f" (all options: {program} --help)")


def check_outputs(options: Options) -> None:
    command_line.check_outputs(options.json_path, options.csv_path)


@pytest.mark.parametrize(
    ("option", "name", "message"),
    [
        ("--json", "no/such/run.json", "does not exist; create it first"),
        ("--csv", ".", "is a directory"),
    ],
)
def test_outputs_are_checked_before_the_run(tmp_path: Path, option: str, name: str, message: str) -> None:
    options = parse_options([option, str(tmp_path / name)])
    with pytest.raises(UsageError, match=message):
        check_outputs(options)


def test_no_output_overwrites_another(tmp_path: Path) -> None:
    options = parse_options(["--json", str(tmp_path / "run"), "--csv", f"{tmp_path}/./run"])
    with pytest.raises(UsageError, match=r"--json and --csv both name '.*run'; give each a file of its own"):
        check_outputs(options)
    check_outputs(parse_options(["--json", "/dev/null", "--csv", "/dev/null"]))


MEMINFO = "MemTotal:       8000000 kB\nMemAvailable:   2097152 kB\n"


def test_memory_is_checked_before_the_run() -> None:
    check_memory(256 * MIB, 2, 3, MEMINFO)
    with pytest.raises(
        BenchError, match=r"256 MiB with 4 ranks and 3 backends needs 4 GiB.*2 GiB are available; lower"
    ):
        check_memory(256 * MIB, 4, 3, MEMINFO)
    check_memory(1 << 40, 64, 4, "an unknown format")
