"""examples/train_elastic.py on two nodes of this machine that fail, leave and come back at random moments.

A node is an agent of `bagua.distributed.run` with one rank. The rendezvous is in the calling process, which outlives
all nodes. What happens, and when, is drawn from a seed; the moments are relative to the job's own progress.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from torch.distributed import TCPStore

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "train_elastic.py"
# A node that is gone is noticed after 3 s, and one that may still come is waited for 1 s.
_RENDEZVOUS = "is_host=0,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=60"
_MAX_DELAY_S = 2.0


@dataclass(frozen=True)
class Outcome:
    """
    Attributes:
        loss: after the last step.
        sizes: the number of ranks of each attempt that began to train, in order.
        events: what was done to the nodes.
    """

    loss: float
    sizes: list[int]
    events: list[str]


class _Node:
    def __init__(self, folder: Path, number: int, port: int, arguments: list[str], device: str) -> None:
        self.log = folder / f"node-{number}.log"
        self.is_expected_to_run = True
        command = [sys.executable, "-m", "bagua.distributed.run", "--nnodes=1:2", "--nproc-per-node=1"]
        command += ["--max-restarts=100", "--rdzv-backend=c10d", "--rdzv-id=job", f"--rdzv-conf={_RENDEZVOUS}"]
        command += [f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1", str(SCRIPT), *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
        if device == "cuda":
            # NCCL lets ranks share a GPU if it takes them for processes of different hosts.
            environment |= {"NCCL_HOSTID": f"node-{number}", "CUDA_VISIBLE_DEVICES": "0"}
            environment |= {"NCCL_SOCKET_IFNAME": "lo", "ENABLE_BAGUA_NET": "1"}
        with self.log.open("wb") as log:
            self.agent = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment)

    def workers(self) -> list[int]:
        try:
            text = Path(f"/proc/{self.agent.pid}/task/{self.agent.pid}/children").read_text()
        except OSError:
            return []
        return [int(pid) for pid in text.split()]

    def kill_worker(self) -> None:
        for pid in self.workers():
            _kill(pid)

    def kill(self) -> None:
        """As if the machine were gone."""
        if self.agent.poll() is None:
            self.agent.send_signal(signal.SIGSTOP)  # so that it starts nothing more
        workers = self.workers()
        self.agent.kill()
        for pid in workers:
            _kill(pid)
        self.agent.wait()

    def leave(self) -> None:
        self.agent.terminate()
        try:
            self.agent.wait(60)
        except subprocess.TimeoutExpired:
            self.agent.send_signal(signal.SIGABRT)  # the log gets the stacks of its threads
            self.agent.wait(60)
            raise


@dataclass
class DisturbedJob:
    """
    Args:
        folder: empty, of checkpoints and logs.
        seed: of the disturbances.
        arguments: of the script.
        disturbances: how many; those that come after the last step do not count.
        timeout_s: of the whole job.
        device: "cpu" or "cuda"; the nodes share the first GPU.
    """

    folder: Path
    seed: int
    arguments: list[str]
    disturbances: int
    timeout_s: float = 240.0
    device: str = "cpu"
    _nodes: list[_Node] = field(default_factory=list)
    _started: int = 0
    _events: list[str] = field(default_factory=list)

    def run(self) -> Outcome:
        """
        Raises:
            TimeoutError: the job did not end; the message has the ends of the logs.
        """
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        draw = random.Random(self.seed)
        self._deadline = time.monotonic() + self.timeout_s
        self._port = store.port
        try:
            self._nodes = [self._start(), self._start()]
            for _ in range(self.disturbances):
                if draw.random() < 0.7:  # otherwise perhaps while the ranks still meet
                    before = self._progress()
                    self._wait(lambda before=before: self._progress() != before, self.timeout_s)
                if self._wait(lambda: False, draw.uniform(0, _MAX_DELAY_S)):
                    break
                self._disturb(draw)
            if not self._wait(lambda: False, self.timeout_s):
                raise TimeoutError(f"not finished within {self.timeout_s:g} s, after {self._events}\n{self._tails()}")
            return Outcome(float(self._lines(r"step \d+: loss (\S+)")[0]), self._sizes(), self._events)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"{error}, after {self._events}\n{self._tails()}") from error
        finally:
            for node in self._nodes:
                node.kill()

    def _start(self) -> _Node:
        self._started += 1
        arguments = [str(self.folder / "checkpoints"), f"--device={self.device}", *self.arguments]
        return _Node(self.folder, self._started, self._port, arguments, self.device)

    def _disturb(self, draw: random.Random) -> None:
        position = draw.randrange(2)
        node = self._nodes[position]
        action: Callable[[], None] = draw.choice((node.kill_worker, node.kill, node.leave))
        self._events.append(f"{action.__name__} {position}")
        action()
        if action != node.kill_worker:
            node.is_expected_to_run = False
            self._wait(lambda: False, draw.uniform(0, 3 * _MAX_DELAY_S))
            self._nodes[position] = self._start()

    def _progress(self) -> str:
        latest = self.folder / "checkpoints" / "latest.json"
        return latest.read_text() if latest.exists() else ""

    def _wait(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Until then, or until the job has ended: whether it has. Nodes that end by themselves are started again."""
        end = min(time.monotonic() + seconds, self._deadline)
        while time.monotonic() < end and not condition():
            if self._lines(r"step \d+: loss .*"):
                return True
            for position, node in enumerate(self._nodes):
                if node.is_expected_to_run and node.agent.poll() is not None:
                    self._events.append(f"agent {position} ended with {node.agent.returncode}")
                    self._nodes[position] = self._start()
            time.sleep(0.05)
        return bool(self._lines(r"step \d+: loss .*"))

    def _lines(self, pattern: str) -> list[str]:
        logs = [path.read_text(errors="replace") for path in sorted(self.folder.glob("node-*.log"))]
        return [found for log in logs for found in re.findall(f"^{pattern}$", log, re.MULTILINE)] if logs else []

    def _sizes(self) -> list[int]:
        begun = [
            tuple(map(int, pair))
            for path in self.folder.glob("node-*.log")
            for pair in re.findall(r"^step (\d+): (\d+) ranks$", path.read_text(errors="replace"), re.MULTILINE)
        ]
        return [ranks for _, ranks in sorted(begun)]

    def _tails(self) -> str:
        return "\n".join(
            f"{path.name}:\n{path.read_text(errors='replace')[-4000:]}" for path in self.folder.glob("*.log")
        )


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
