"""`bagua-net` itself: help, version, bad usage, colour, and the list of settings."""

from __future__ import annotations

import importlib.metadata
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from support.fresh_process import TIMEOUT_S, RunCommand, RunNet

import bagua
from bagua.cli.doctor_report import rendered
from bagua.cli.net import main, make_parser
from bagua.cli.terminal import Terminal
from bagua.net.doctor.finding import Report, Section, fail, ok


def test_version_as_a_script_and_as_a_module(net: RunNet, run_command: RunCommand, environment: dict[str, str]) -> None:
    version = importlib.metadata.version("bagua")
    assert bagua.__version__ == version
    for result in (net("--version"), run_command([sys.executable, "-m", "bagua.cli.net", "--version"], environment)):
        assert (result.returncode, result.stdout) == (0, f"bagua-net {version}\n")


def test_help_of_all_subcommands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    text = capsys.readouterr().out
    for subcommand in make_parser()[1].choices:
        with pytest.raises(SystemExit, match="0"):
            main([subcommand, "--help"])
        assert capsys.readouterr().out.startswith("usage: bagua-net")
        assert f"\n  {subcommand}" in text or subcommand == "knobs"
    groups = [line.removesuffix(":") for line in text.splitlines() if line.endswith(":") and line == line.lower()]
    assert groups == ["options", "switch it on and off", "check", "measure", "watch", "set up"]
    with pytest.raises(SystemExit, match="0"):
        main(["help"])
    assert capsys.readouterr().out == text
    with pytest.raises(SystemExit, match="0"):
        main(["help", "doctor"])
    assert capsys.readouterr().out.startswith("usage: bagua-net doctor ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "  doctor      "),
        (["secret"], "  new     "),
        (["trace"], "  merge     "),
        (["trace", "mrge"], "invalid choice: 'mrge' (choose from"),
        (["--verison"], "unknown option --verison; did you mean --version?"),
        (["--json", "doctor"], "unknown option --json; `bagua-net --help` lists what there is"),
        (["doctr"], "unknown command 'doctr'; did you mean doctor?"),
        (["doctor", "--wrong"], "bagua-net doctor: error: unknown argument '--wrong'; `bagua-net doctor --help`"),
        (["doctor", "--jsn"], "did you mean --json?"),
        (["enable", "extra"], "usage: bagua-net enable "),
        (["bench", "--quik"], "bagua-net-bench"),
        (["stats", "--pid", "abc"], "'abc' is not an integer; give one in 1..4194304"),
        (["top", "--json", "--endpoints", "foo"], "'foo' names no port; write HOST:PORT"),
        (["top", "--json", "--hosts=-oProxyCommand=x"], "-oProxyCommand=x"),
        (["blame", "--endpoints", "foo"], "'foo' names no port; write HOST:PORT"),
        (["blame", "--ras", "foo"], "--ras foo: 'foo' names no port; write HOST:PORT"),
        (["blame", "--after", "0"], "--after"),
        (["blame", "--hosts", "a,b c"], "b c"),
        (["env", "--shell", "tcsh"], "invalid choice: 'tcsh'"),
        (["run", "--nproc=2", "--", "true"], "--nproc=2"),
        *(
            (["run", *words], "bagua-net run: no command given; write it after the options: bagua-net run -- ")
            for words in ([], ["--"], ["--by-name"], ["--by-name", "--"], ["--", ""])
        ),
    ],
)
def test_bad_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(arguments)
    except SystemExit as exit_:
        code = int(str(exit_.code))
    output, errors = capsys.readouterr()
    assert (code, output) == (2, "")
    assert message in errors


def test_settings_as_text_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["knobs"]) == main(["settings", "--json"]) == 0
    text, _, document = capsys.readouterr().out.rpartition("\n[")
    settings = json.loads("[" + document)
    assert {"ENABLE_BAGUA_NET", "BAGUA_NET_REQUIRED", "BAGUA_NET_NSTREAMS"} <= {one["name"] for one in settings}
    for one in settings:
        assert f"{one['name']}\n    {one['type']}, default {one['default_value']}, range {one['range']}" in text


@pytest.mark.parametrize(
    ("where", "code", "said"),
    [
        ("| true", {0, 1}, ""),  # as with `| head -1`
        (">&-", {0}, ""),
        ("> /dev/full", {1}, "the output cannot be written (No space left on device)"),
        ("> /dev/null", {0}, ""),
    ],
)
@pytest.mark.parametrize(
    "words", ["bagua-net knobs", "bagua-net-bench --backends bare -b 8 -e 8 -n 1 --repeats 1 --local"]
)
def test_output_that_goes_nowhere(
    words: str,
    where: str,
    code: set[int],
    said: str,
    run_command: RunCommand,
    bagua_net: Path,
    environment: dict[str, str],
) -> None:
    program, *rest = words.split()
    script = f"'{bagua_net.with_name(program)}' {' '.join(rest)} {where}; exit ${{PIPESTATUS[0]}}"
    result = run_command(["bash", "-c", script], environment)
    assert "Traceback" not in result.stderr
    assert "Exception ignored" not in result.stderr
    assert said in result.stderr
    assert result.returncode in code


@pytest.mark.parametrize(
    ("variables", "has_colour"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_colour_on_a_terminal(
    variables: dict[str, str], has_colour: bool, bagua_net: Path, environment: dict[str, str]
) -> None:
    del environment["NO_COLOR"]
    ours, theirs = pty.openpty()
    try:
        own = {**environment, "TERM": "xterm", **variables}
        subprocess.run([bagua_net, "knobs"], env=own, stdout=theirs, check=True, timeout=TIMEOUT_S)
        shown = os.read(ours, 4096)
    finally:
        os.close(ours)
        os.close(theirs)
    assert (b"\x1b[1mENABLE_BAGUA_NET" in shown) is has_colour


@pytest.mark.parametrize("width", [40, 60])
def test_a_report_fits_the_terminal(width: int) -> None:
    table = (("variable", "value"), ("NCCL_DEBUG", "INFO"), ("X", "a b " * 20))
    findings = (ok("fine"), fail("a long " * 12 + "text", "put it right"))
    report = Report("1.0.0", (Section("nccl", "NCCL", findings, table=table),), python="/usr/bin/python")
    shown = rendered(report, "Failed checks: NCCL.", Terminal(width, is_coloured=False))
    assert max(map(len, shown.splitlines())) <= width
    for word in ("fine", "put it right", "NCCL_DEBUG", "INFO", "Failed checks: NCCL."):
        assert word in shown
    assert "\x1b[1;31mFAIL\x1b[0m" in rendered(report, "", Terminal(width, is_coloured=True))
