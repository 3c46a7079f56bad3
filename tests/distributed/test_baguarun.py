"""`baguarun` on two "hosts": with a program in place of ssh, which runs the command here, and with a real sshd."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.ports import free_port
from support.processes import living_pids, wait_until

from bagua.distributed.ssh_job import READY

TIMEOUT_S = 240
BAGUARUN = [sys.executable, "-m", "bagua.script.baguarun"]
SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")

# Every rank says who it is, leaves its process id in a folder, and waits.
PROGRAM = """
import os, signal, sys
told = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "TOKEN")]
print(*told, sys.argv[1:], sys.stdin.read() == "", flush=True)
open(os.path.join("pids", str(os.getpid())), "w")
signal.pause()
"""

FAKE_SSH = """#!/bin/sh
for word; do :; done
exec sh -c "$word"
"""

SSHD_CONFIG = """
ListenAddress 127.0.0.1
Port {port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
StrictModes no
UsePAM no
PidFile none
"""

SSH_CONFIG = """
Host *
    HostName 127.0.0.1
    Port {port}
    IdentityFile {folder}/user_key
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known_hosts
    StrictHostKeyChecking accept-new
    LogLevel ERROR
"""


class Hosts:
    """Two names of this machine, and what `ssh` in PATH is."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pids = folder / "pids"
        self.pids.mkdir()
        (folder / "bin").mkdir()
        (folder / "train.py").write_text(PROGRAM)

    def install_ssh(self, text: str) -> None:
        program = self.folder / "bin" / "ssh"
        program.write_text(text)
        program.chmod(0o755)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        options = ["--host_list=hosta,hostb", "--master_addr=127.0.0.1", f"--master_port={free_port()}", "-x", "TOKEN"]
        env = {**os.environ, "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", "TOKEN": "a 'b'"}
        return subprocess.Popen(
            [*BAGUARUN, *options, "train.py", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            env=env,
        )

    def run(self, *arguments: str) -> tuple[int, str, str]:
        with self.start(*arguments) as process:
            output, errors = process.communicate(timeout=TIMEOUT_S)
        return process.returncode, output, errors


@pytest.fixture
def hosts(tmp_path: Path) -> Hosts:
    made = Hosts(tmp_path)
    made.install_ssh(FAKE_SSH)
    return made


@pytest.fixture
def real_hosts(tmp_path: Path) -> Iterator[Hosts]:
    if SSHD is None or os.geteuid() != 0:
        pytest.skip("needs root and sshd: apt-get install openssh-server")
    made = Hosts(tmp_path)
    port = free_port()
    for name in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True, timeout=60)
    (tmp_path / "sshd_config").write_text(SSHD_CONFIG.format(port=port, folder=tmp_path))
    (tmp_path / "ssh_config").write_text(SSH_CONFIG.format(port=port, folder=tmp_path))
    made.install_ssh(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {tmp_path}/ssh_config "$@"\n')
    Path("/run/sshd").mkdir(exist_ok=True)  # sshd insists
    command = [SSHD, "-D", "-e", "-f", str(tmp_path / "sshd_config")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            started = server.stderr.readline()
            assert "Server listening" in started, started
            yield made
        finally:
            server.terminate()


# By a real ssh where there is one; what is in its place elsewhere shows no more.
_ANY_HOSTS = "hosts" if SSHD is None or os.geteuid() != 0 else "real_hosts"


def _ended(hosts: Hosts, number: signal.Signals, count: int, *arguments: str) -> tuple[int, list[str]]:
    """The exit status of baguarun and so many lines that it has printed, after all ranks have ended, too."""
    with hosts.start(*arguments) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline().rstrip("\n") for _ in range(count)]
        wait_until(lambda: len(list(hosts.pids.iterdir())) == 2, "both ranks have started", TIMEOUT_S)
        process.send_signal(number)
        process.communicate(timeout=TIMEOUT_S)
    wait_until(lambda: living_pids(hosts.pids) == [], "all ranks have ended", TIMEOUT_S)
    return process.returncode, sorted(lines)


def test_all_ranks_say_where_they_run_and_end_if_baguarun_is_killed(request: pytest.FixtureRequest) -> None:
    hosts: Hosts = request.getfixturevalue(_ANY_HOSTS)
    status, lines = _ended(hosts, signal.SIGKILL, 2, "x y", "$HOME")
    assert status == -signal.SIGKILL
    assert lines == [f"host{name}: {rank} 2 a 'b' ['x y', '$HOME'] True" for rank, name in enumerate("ab")]


# In place of launchers, which import torch. They end when their input is closed, as do those of the tests below.
LAUNCHERS = """#!/bin/sh
echo {ready}
touch {pids}/$$
case "$*" in *" hostb "*)
    while [ "$(ls {pids} | wc -l)" -lt 2 ]; do sleep 0.01; done
    echo "a process failed." >&2
    exit {status}
esac
{end}
"""


@pytest.mark.parametrize(("status", "end"), [(0, "exit 0"), (7, "read -r _")])
def test_a_failure_on_one_host_ends_the_others(hosts: Hosts, status: int, end: str) -> None:
    hosts.install_ssh(LAUNCHERS.format(ready=READY, pids=hosts.pids, status=status, end=end))
    found, _, errors = hosts.run()
    assert found == status
    assert "hostb: a process failed." in errors
    told = errors.rstrip().splitlines()[-1].startswith("baguarun: the launcher on hostb failed with exit status 7;")
    assert told == (status == 7)
    assert len(list(hosts.pids.iterdir())) == 2
    assert living_pids(hosts.pids) == []


def test_ctrl_c_ends_everything(hosts: Hosts) -> None:
    """What is in the launchers' place ends as they do, when its input is closed."""
    hosts.install_ssh(f"#!/bin/sh\necho {READY}\ntouch {hosts.pids}/$$\nread -r _\n")
    assert _ended(hosts, signal.SIGINT, 0)[0] == 128 + signal.SIGINT
