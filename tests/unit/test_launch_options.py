"""What the launchers make of their flags, and what they say to wrong ones. torch is not needed for any of it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bagua.distributed import launch, options
from bagua.distributed import run as bagua_run
from bagua.distributed.ssh_job import RemoteHost, parse_hosts, remote_command, ssh_command
from bagua.script import baguarun

_PLUGIN = "--enable_bagua_net"


def _variables(*words: str) -> dict[str, str]:
    return launch.variables(launch.make_parser().parse_args([*words, "train.py"]))


def test_flags_of_bagua_set_their_variables() -> None:
    """In both spellings."""
    assert _variables() == {"NODE_RANK": "0"}
    flags = ["--default_bucket_size", "32M", "--enable_bagua_net", "--autotune_max_samples=7", "--autotune_level", "1"]
    flags += ["--autotune_warmup_time", "2", "--autotune_sampling_confidence_time", "0.5", "--is_output_autotune_log"]
    hyphens = [word.replace("_", "-") if word.startswith("--") else word for word in flags]
    expected = {
        "NODE_RANK": "1",
        "ENABLE_BAGUA_NET": "1",
        "BAGUA_DEFAULT_BUCKET_SIZE": "32M",
        "BAGUA_AUTOTUNE": "1",
        "BAGUA_AUTOTUNE_MAX_SAMPLES": "7",
        "BAGUA_AUTOTUNE_WARMUP_TIME_S": "2.0",
        "BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S": "0.5",
        "BAGUA_IS_OUTPUT_AUTOTUNE_LOG": "1",
        "BAGUA_SERVICE_PORT": "29501",
        "AUTO_TUNE_SERVER_ADDR": "host0:29501",
    }
    assert _variables("--nnodes=2", "--node_rank=1", "--master_addr=host0", *flags) == expected
    assert _variables("--nnodes=2", "--node-rank=1", "--master-addr=host0", *hyphens) == expected


def test_options_behind_the_script_are_its_own() -> None:
    options = launch.make_parser().parse_args(["--nnodes", "2", "train.py", "--nnodes", "9", "-m", "--", "a b"])
    assert (options.nnodes, options.module) == (2, False)
    assert launch.torchrun_arguments(options)[-6:] == ["train.py", "--nnodes", "9", "-m", "--", "a b"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--nproc_per_node", "0"], "0 is too small: start at least 1 process per node"),
        (["--nproc_per_node", "many"], "'many' must be a number, auto, gpu or cpu"),
        (["--nnodes", "0"], "0 is too small: it must be at least 1"),
        (["--master_port", "70000"], "70000 is not a port: it must be from 1 to 65535"),
        (["--default_bucket_size", "big"], "big: must be a number of bytes, at least 1"),
    ],
)
def test_values_out_of_range(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        launch.main([*words, "train.py"])
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "needed"),
    [(launch.main, "SCRIPT"), (bagua_run.main, "training_script"), (baguarun.main, "--host_list/--host-list, SCRIPT")],
)
def test_a_missing_script_is_required_and_its_arguments_are_not(
    command: Callable[[list[str]], int], needed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if command is bagua_run.main:
        pytest.importorskip("torch", reason="needs PyTorch, which bagua.distributed.run imports")
    with pytest.raises(SystemExit):
        command([])
    assert capsys.readouterr().err.endswith(f"required: {needed}\n")


@pytest.mark.parametrize(("words", "has_gpu", "told"), [([_PLUGIN], False, 1), ([_PLUGIN], True, 0), ([], False, 0)])
def test_the_plugin_without_a_gpu_is_told(
    words: list[str], has_gpu: bool, told: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(options, "has_gpu", lambda: has_gpu)
    options.say_without_gpu("launch", launch.make_parser().parse_args([*words, "train.py"]))
    assert capsys.readouterr().err.count("launch: --enable_bagua_net has no effect on this host") == told


@pytest.mark.parametrize(
    ("words", "told", "remedy"),
    [
        (["missing.py"], "missing.py: no such file in ", "Give the path of the script"),
        (["--no_python", "missing-program"], "missing-program: no such program in PATH", "./NAME"),
        (
            ["--node_rank=2", "--nnodes=2", "x"],
            "--node_rank=2 with --nnodes=2: must be from 0 to 1",
            "Number the nodes",
        ),
        (["--master_addr=nohost.invalid", __file__], "--master_addr=nohost.invalid cannot be resolved", "getent hosts"),
        (["-m", "--no_python", "x"], "-m and --no_python exclude each other", "needs Python"),
        (["--host_list=a,b", "x"], "--host_list=a,b: this command starts the processes of one node", "Use baguarun"),
    ],
)
def test_errors_name_the_remedy(words: list[str], told: str, remedy: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(words) != 0
    printed = capsys.readouterr().err
    assert printed.startswith(f"python -m bagua.distributed.launch: {told}")
    assert remedy in printed


# --- baguarun --------------------------------------------------------------------------------------------------------


def test_host_list() -> None:
    assert parse_hosts("a:2222, user@b.example ,[fe80::1]:22,10.0.0.1", 23) == (
        RemoteHost("a:2222", "a", 2222),
        RemoteHost("user@b.example", "user@b.example", 23),
        RemoteHost("[fe80::1]:22", "fe80::1", 22),
        RemoteHost("10.0.0.1", "10.0.0.1", 23),
    )
    assert parse_hosts("user@a", None)[0].address == "a"


@pytest.mark.parametrize("text", ["", "a,,b", "-oProxyCommand=x", "a:0", "a:99999", "a b", "a;b", "a,b,a", "u@-x"])
def test_malformed_host_lists(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert baguarun.main(["--host_list", text, "x"] if not text.startswith("-") else [f"--host_list={text}", "x"]) == 2
    assert capsys.readouterr().err.startswith("baguarun: --host_list: ")


@pytest.mark.parametrize(
    ("variable", "told"), [("NOT_SET_HERE", "the variable is not set here"), ("1A=2", "is not a variable")]
)
def test_wrong_variables(variable: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert baguarun.main(["--host_list=a", "-x", variable, "x"]) == 2
    assert told in capsys.readouterr().err


def test_every_byte_of_the_arguments_survives_the_remote_shell(tmp_path: Path) -> None:
    folder = tmp_path / "it's a $HOME; `dir`"
    folder.mkdir()
    words = ["a b", "$HOME", "'", '"', "`id`", "\\", "*", "", "new\nline", "!x", "-n", "é"]
    program = "import os, sys; print(os.getcwd(), os.environ['V'], sys.argv[1:])"
    command = remote_command(str(folder), {"V": "x'y $Z\n"}, [sys.executable, "-c", program, *words])
    for shell in ("sh", "bash"):
        done = subprocess.run([shell, "-c", command], capture_output=True, text=True, check=True, timeout=60)
        assert done.stdout == f"bagua: host ready\n{folder} x'y $Z\n {words}\n"


def test_ssh_never_asks_and_takes_no_option_from_a_host() -> None:
    command = ssh_command(RemoteHost("a:2222", "a", 2222), "true", 7)
    assert command[0] == "ssh"
    assert command[-5:] == ["-p", "2222", "--", "a", "true"]
    assert {"BatchMode=yes", "ConnectTimeout=7"} <= set(command)
    assert "-p" not in ssh_command(RemoteHost("a", "a", None), "true", 7)


def test_flags_reach_the_launcher_of_each_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "se cret")
    words = (
        "--host_list h1:2222,user@h2 --nproc_per_node 4 --master_port 1234 --enable_bagua_net --logdir logs -x TOKEN"
    )
    options = baguarun.make_parser().parse_args([*words.split(), "train.py", "--lr", "1"])
    for rank, (host, command) in enumerate(baguarun.commands(options)):
        assert host.login == ("h1", "user@h2")[rank]
        (script,) = shlex.split(command[-1])[3:]
        launched = shlex.split(script)
        assert {"TOKEN=se cret", "BAGUA_NODE_DOMAIN_NAMES=h1,h2", "BAGUA_SSH_PORT=22"} <= set(launched)
        theirs = launch.make_parser().parse_args(launched[launched.index("bagua.distributed.launch") + 1 :])
        assert (theirs.nnodes, theirs.node_rank, theirs.nproc_per_node) == (2, rank, "4")
        assert (theirs.master_addr, theirs.master_port, theirs.logdir) == ("h1", 1234, "logs")
        assert theirs.enable_bagua_net
        assert theirs.end_with_stdin
        assert [theirs.script, *theirs.script_args] == ["train.py", "--lr", "1"]


FAKE_SSH = """#!/bin/sh
case " $* " in
*" silent "*) exec tail -f /dev/null ;;
*" unknown "*) echo "cannot resolve unknown" >&2; exit 255 ;;
esac
for word; do :; done
exec sh -c "$word"
"""


@pytest.fixture
def _fake_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(FAKE_SSH)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)


@pytest.mark.usefixtures("_fake_ssh")
@pytest.mark.parametrize(
    ("hosts", "told", "remedy"),
    [
        ("unknown:2222", "ssh to unknown:2222 failed with exit status 255", "ssh -p 2222 unknown true"),
        ("silent", "silent did not answer within 1 s", "--timeout"),
    ],
)
def test_hosts_that_cannot_be_reached(hosts: str, told: str, remedy: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert baguarun.main([f"--host_list={hosts}", "--timeout=1", "x"]) == 1
    printed = capfd.readouterr().err
    assert f"baguarun: {told}" in printed
    assert remedy in printed


def test_no_ssh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert baguarun.main(["--host_list=a", "x"]) == 1
    assert "ssh cannot be started" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--nnodes", "1", "--regroup", "x"], "--regroup must be the first argument"),
        (["--regroup", "--nnodes", "1"], "the script is missing"),
        (["--regroup", "--store-only", "x"], "--store-only starts no ranks"),
        (["--regroup", "absent.py"], "absent.py: no such file"),
        (["--regroup", "--max-restarts=3", "x"], "--max-restarts together with --regroup: it counts restarts of all"),
        (["--regroup", "--standalone", "x"], "--standalone together with --regroup: it is an option of torchrun"),
        (["--regroup", "--nnodes=1:2", "--node-rank=2", "x"], "--node-rank=2 with --nnodes=1:2: must be from 0 to 1"),
        (["--regroup", "--nnodes=4:2", "x"], "4:2: MAX must be at least MIN"),
        (["--regroup", "--rdzv-conf=timeout=3", "x"], "'timeout' is unknown: it takes join_timeout and last_call"),
        (["--regroup", "--rank-restarts=-1", "x"], "-1 is too small"),
    ],
)
def test_what_run_refuses_under_regroup(arguments: list[str], told: str, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch", reason="needs PyTorch, which bagua.distributed.run imports")
    try:
        status = bagua_run.main(arguments)
    except SystemExit as ended:  # argparse's
        status = ended.code
    assert status == 2
    assert told in capfd.readouterr().err


def test_a_flag_of_the_script_is_not_one_of_the_launcher() -> None:
    pytest.importorskip("torch", reason="needs PyTorch, which bagua.distributed.run imports")
    chosen = bagua_run.make_parser().parse_args(["--nproc-per-node=2", "train.py", "--regroup", "--store-only"])
    assert not chosen.regroup
    assert chosen.training_script_args == ["--regroup", "--store-only"]
