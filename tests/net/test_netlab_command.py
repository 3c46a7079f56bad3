"""tools/netlab's command line: ranks on hosts, exit codes, and what it refuses."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from support.labs import namespaces_of, needs_lab
from support.processes import is_alive

# isort: split
from netlab import Lab, SlowFlows, cli, parse_rate_mbit, parse_slow_flows

_ROOT = Path(__file__).resolve().parents[2]

# `-m tools.netlab` is meant for the root of the repository, so the directory has to count.
_CLI_ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}


def _netlab(
    *arguments: str, before: Sequence[str] = (), preexec_fn: Callable[[], None] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *before, "-m", "tools.netlab", *arguments]
    return subprocess.run(
        command, cwd=_ROOT, env=_CLI_ENVIRONMENT, capture_output=True, text=True, timeout=240, preexec_fn=preexec_fn
    )


def _drop_capabilities() -> None:
    """Between fork and exec: nothing is left in this process or gained by the program it becomes."""
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in range(41):
        libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP; fails, harmlessly, for one that was not there


def test_cli_without_capabilities_says_what_is_lacking() -> None:
    for action in (["run", "--", "true"], ["sweep"], ["check"]):
        result = _netlab(*action, preexec_fn=_drop_capabilities)
        assert result.returncode == 125, result
        assert "lacks CAP_NET_ADMIN and CAP_SYS_ADMIN: run it as root" in result.stderr
        assert "Traceback" not in result.stderr


@needs_lab
def test_cli_check_builds_a_network() -> None:
    result = _netlab("check")
    assert result.returncode == 0, result.stderr
    assert "can build networks" in result.stdout


@needs_lab
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two hosts cannot have a CPU each where there is one")
def test_hosts_have_cpus_of_their_own_where_asked() -> None:
    program = "import os; print(*sorted(os.sched_getaffinity(0)))"
    usable = sorted(os.sched_getaffinity(0))
    shared = _netlab("run", "--", sys.executable, "-c", program)
    assert sorted(shared.stdout.splitlines()) == [f"[h{host}] {' '.join(map(str, usable))}" for host in (0, 1)]
    own = _netlab("run", "--own-cpus", "--", sys.executable, "-c", program)
    first, second = (
        line.removeprefix(f"[h{host}] ").split() for host, line in enumerate(sorted(own.stdout.splitlines()))
    )
    assert len(first) == len(second) == len(usable) // 2
    assert not set(first) & set(second)


def test_own_cpus_for_more_hosts_than_cpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    with pytest.raises(ValueError, match="own_cpus is set for 3 hosts; this process may use 2 CPUs"):
        Lab(hosts=3, own_cpus=True)


@needs_lab
def test_cli_run_gives_ranks_marks_output_and_returns_the_worst_code() -> None:
    script = (
        'echo "$RANK/$WORLD_SIZE $MASTER_ADDR:$MASTER_PORT $NCCL_SOCKET_IFNAME $X"; echo err >&2; exit $((RANK * 3))'
    )
    result = _netlab("run", "--hosts", "3", "--rate", "1G", "--mtu", "9000", "--env", "X=y", "--", "sh", "-c", script)
    assert result.returncode == 6, result.stderr
    assert sorted(result.stdout.splitlines()) == [f"[h{rank}] {rank}/3 10.77.0.1:29500 =eth0 y" for rank in range(3)]
    assert {f"[h{rank}] err" for rank in range(3)} < set(result.stderr.splitlines())
    assert "netlab: host 2 exited with code 6" in result.stderr


@needs_lab
def test_cli_ends_the_others_after_a_failure_and_all_after_the_timeout() -> None:
    failed = _netlab("run", "--grace", "0.5", "--", "sh", "-c", "test $RANK = 1 && kill -9 $$; sleep 60")
    assert failed.returncode == 137
    assert "host 1 was ended by SIGKILL" in failed.stderr
    assert "hosts [0] still run 0.5 s after the failure" in failed.stderr
    late = _netlab("run", "--timeout", "0.5", "--", "sleep", "60")
    assert late.returncode == 124
    assert "hosts [0, 1] still run after 0.5 s (--timeout)" in late.stderr


@needs_lab
def test_cli_terminated_leaves_nothing() -> None:
    command = [sys.executable, "-m", "tools.netlab", "run", "--", "sh", "-c", "echo $$; sleep 60"]
    with subprocess.Popen(command, cwd=_ROOT, env=_CLI_ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        started = [int(process.stdout.readline().split()[1]) for _ in range(2)]
        process.terminate()
        assert process.wait(60) == 143
    assert not any(is_alive(pid) for pid in started)
    assert namespaces_of(process.pid) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--rate", "10", "--", "true"], "rate '10' is not a number with a unit: write 400M, 2.5G or 10G"),
        (["run", "--rate", "900G", "--", "true"], "rate is 900000 Mbit/s; it must be 1 to 400000 Mbit/s"),
        (["run", "--uneven", "5:0=1G", "--", "true"], "--uneven names 5:0; with --hosts 2 --nics 1 the last is 1:0"),
        (["run", "--env", "A", "--", "true"], "'A' is not NAME=VALUE"),
        (["run", "--rate", "1G"], "no command; write it after --, as in: PYTHONPATH=tools python -m netlab run "),
        (["run", "--slow-flows", "1/4=40M", "--", "true"], "--slow-flows needs --per-flow, the cap of the other flows"),
        (
            ["run", "--delay", "1ms", "--mtu", "65535", "--", "true"],
            "--mtu 65535: with --delay it must be at most 65521",
        ),
        (["run", "--loss", "1", "--", "true"], "loss '1' is not a percentage: write 1% or 0.1%"),
        (["run", "--slow-flows", "1/4", "--", "true"], "write 1/4=40M for one flow in four"),
        (
            ["run", "--per-flow", "40M", "--slow-flows", "1/4=80M", "--", "true"],
            "--slow-flows at 80 Mbit/s are faster than the others, which --per-flow caps at 40 Mbit/s",
        ),
    ],
)
def test_cli_errors_name_the_value_and_the_remedy(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2, "125 is for a network that cannot be built"
    assert message in capsys.readouterr().err


# --- spellings ---


@pytest.mark.parametrize(
    ("text", "mbit"), [("10G", 10_000), ("2.5g", 2500), ("400M", 400), ("1500kbit", 1.5), ("100Gbit/s", 100_000)]
)
def test_rates_are_bits_a_second_in_powers_of_ten(text: str, mbit: float) -> None:
    assert parse_rate_mbit(text) == pytest.approx(mbit)
    assert parse_slow_flows(f"1/8={text}") == SlowFlows(8, parse_rate_mbit(text))
