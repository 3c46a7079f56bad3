"""tools/netlab: what commands on its hosts see, and whether it leaves anything behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.labs import Lab, namespaces_of, needs_lab
from support.processes import is_alive, wait_until

# isort: split
import netlab
from netlab import NetlabError, missing_privilege
from netlab.netlink import Netlink

_ROOT = Path(__file__).resolve().parents[2]


# --- commands on hosts ---


@needs_lab
def test_a_command_sees_its_host_and_nothing_of_the_machine() -> None:
    with Lab(nics=2) as lab:
        listed = lab.run(1, ["ls", "/sys/class/net"], check=True).stdout.split()
        assert sorted(listed) == ["eth0", "eth1", "lo"]
        assert lab.run(1, ["cat", "/sys/class/net/eth1/operstate"]).stdout == "up\n"
        cgroups = sorted(entry.name for entry in Path("/sys/fs/cgroup").iterdir())
        assert sorted(lab.run(1, ["ls", "-A", "/sys/fs/cgroup"], check=True).stdout.split()) == cgroups
        script = "import socket; s = socket.create_server(('127.0.0.1', 0)); socket.create_connection(s.getsockname())"
        lab.run(1, [sys.executable, "-c", script], check=True)


@needs_lab
def test_environment_input_output_and_exit_codes() -> None:
    with Lab() as lab:
        result = lab.run(0, ["sh", "-c", "cat; echo $A; echo oops >&2; exit 7"], {"A": "value"}, stdin_text="in,")
        assert (result.returncode, result.stdout, result.stderr) == (7, "in,value\n", "oops\n")
        with pytest.raises(subprocess.CalledProcessError):
            lab.run(0, ["false"], check=True)
        missing = lab.run(0, ["no-such-program"])
        assert (missing.returncode, missing.stderr) == (127, "netlab: command 'no-such-program' not found\n")
        barred = lab.run(0, [str(Path(__file__))])
        assert barred.returncode == 126
        assert "cannot be started: Permission denied" in barred.stderr
        with pytest.raises(ValueError, match="host is 2; this lab has hosts 0 to 1"):
            lab.run(2, ["true"])
        with pytest.raises(ValueError, match="command is empty"):
            lab.run(0, [])


@needs_lab
def test_hosts_differ_in_what_nccl_calls_a_host() -> None:
    with Lab(hosts=3, nics=2) as first, Lab() as second:
        ids = [first.rank_environment(host)["NCCL_HOSTID"] for host in range(3)]
        ids += [second.rank_environment(host)["NCCL_HOSTID"] for host in range(2)]
        assert len(set(ids)) == 5
        environment = first.rank_environment(2)
        assert environment["NCCL_SOCKET_IFNAME"] == "=eth0,eth1"
        assert (environment["RANK"], environment["WORLD_SIZE"], environment["LOCAL_RANK"]) == ("2", "3", "0")


# --- nothing is left behind ---


@needs_lab
def test_leaving_the_block_removes_namespaces_and_processes_also_detached_ones() -> None:
    interfaces = sorted(Path("/sys/class/net").iterdir())
    with Lab(hosts=3) as lab:
        assert len(namespaces_of(os.getpid())) == 4
        detached = int(lab.run(0, ["sh", "-c", "setsid sleep 60 >/dev/null 2>&1 & echo $!"]).stdout)
        stubborn = lab.start(1, ["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.2; done"], stdout=-1)
        assert stubborn.stdout is not None
        assert stubborn.stdout.readline() == b"ready\n"
        assert is_alive(detached)
    assert not is_alive(detached)
    assert stubborn.wait(60) == -signal.SIGKILL
    stubborn.stdout.close()
    assert namespaces_of(os.getpid()) == []
    assert sorted(Path("/sys/class/net").iterdir()) == interfaces
    lab.close()
    with pytest.raises(NetlabError, match="not running"):
        lab.run(0, ["true"])


@needs_lab
def test_a_failure_while_building_removes_what_was_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise NetlabError("no more links")

    monkeypatch.setattr(Netlink, "join_bridge", fail)
    with pytest.raises(NetlabError, match="no more links"):
        Lab(hosts=3).__enter__()
    assert namespaces_of(os.getpid()) == []
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


_HOLDER = """
import sys, time
sys.path.append(sys.argv[1])
from netlab import Lab
with Lab() as lab:
    held = lab.run(0, ["sh", "-c", "setsid sleep 60 >/dev/null 2>&1 & echo $!"]).stdout
    print(held, flush=True)
    time.sleep(60)
"""


@contextmanager
def _holder() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that holds a lab, and a detached process in that lab."""
    command = [sys.executable, "-c", _HOLDER, str(_ROOT / "tools")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


@needs_lab
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_the_lab_in_order(number: signal.Signals) -> None:
    with _holder() as (process, detached):
        assert len(namespaces_of(process.pid)) == 2
        process.send_signal(number)
        process.wait(60)
        assert namespaces_of(process.pid) == []
        assert not is_alive(detached)
    assert process.returncode in (128 + number, -number)


@needs_lab
def test_sweep_removes_what_a_killed_process_left_and_nothing_else() -> None:
    with Lab() as lab, _holder() as (live, _), _holder() as (killed, orphan):
        killed.kill()
        killed.wait(60)
        left = namespaces_of(killed.pid)
        assert len(left) == 2
        swept = netlab.sweep()
        # Labs of other tests sweep as they begin: each name is removed by one of us.
        wait_until(lambda: namespaces_of(killed.pid) == [], "the end of the namespaces")
        assert not set(swept) & set(namespaces_of(live.pid))
        wait_until(lambda: not is_alive(orphan), "the end of the orphan inside")
        assert len(namespaces_of(live.pid)) == 2
        assert lab.run(0, ["true"]).returncode == 0


# --- what the kernel lacks ---


def test_lacking_capabilities_are_named_with_the_remedy() -> None:
    without_admin = ~(1 << 21) & ((1 << 40) - 1)
    text = missing_privilege(without_admin)
    assert text is not None
    assert "lacks CAP_SYS_ADMIN: run it as root (sudo)" in text
    assert "--cap-add SYS_ADMIN" in text
    assert "lacks CAP_NET_ADMIN and CAP_SYS_ADMIN" in str(missing_privilege(0))
