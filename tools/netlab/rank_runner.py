"""Runs one command on every host of a lab, once or several times, as the ranks of one job, with the output of each
marked: `[h0]`, `[h1]`, or where hosts have several ranks, `[h0.0]`, `[h0.1]`...

The calling thread starts and watches the processes; two threads a rank copy its output, and end with it.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO

from .lab import Lab

EXIT_TIMEOUT = 124  # as timeout(1)
_POLL_SECONDS = 0.05
_TERMINATE_SECONDS = 5.0
_COPY_SECONDS = 1.0
_write_lock = threading.Lock()  # one line of output at a time


def _copy_lines(source: IO[bytes], target: IO[bytes], mark: bytes) -> None:
    with source:
        for line in source:
            with _write_lock:
                target.write(mark + line if line.endswith(b"\n") else mark + line + b"\n")
                target.flush()


def _report(text: str) -> None:
    with _write_lock:
        print(f"netlab: {text}", file=sys.stderr, flush=True)


def _describe(code: int) -> str:
    if code > 128 and code - 128 in {int(number) for number in signal.Signals}:
        return f"was ended by {signal.Signals(code - 128).name}"
    return f"exited with code {code}"


class RankRunner:
    """Owns the processes of one job.

    Args:
        grace_seconds: How long the others may go on after the first failure.
        gpus: What ranks see, by host; none: all of them see all.
    """

    def __init__(
        self,
        lab: Lab,
        *,
        timeout_seconds: float | None,
        grace_seconds: float,
        gpus: Sequence[str] = (),
        ranks_per_host: int = 1,
    ) -> None:
        self._lab = lab
        self._ranks_per_host = ranks_per_host
        self._timeout_seconds = timeout_seconds
        self._grace_seconds = grace_seconds
        self._gpus = gpus

    def run(self, command: Sequence[str], env: Mapping[str, str]) -> int:
        """The worst exit code of all ranks; 124 if the time was up."""
        processes: list[subprocess.Popen[bytes]] = []
        copiers: list[threading.Thread] = []
        try:
            for rank in range(len(self._lab.hosts) * self._ranks_per_host):
                host, local_rank = divmod(rank, self._ranks_per_host)
                environment = {**self._lab.rank_environment(host, local_rank, self._ranks_per_host), **env}
                if self._gpus:
                    environment["CUDA_VISIBLE_DEVICES"] = self._gpus[host]
                process = self._lab.start(
                    host, command, environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
                )
                processes.append(process)
                copiers += self._copy_output(rank, process)
            timed_out = self._watch(processes)
        finally:
            self._end(processes)
            # A grandchild may hold a pipe open; closing the lab ends it.
            deadline = time.monotonic() + _COPY_SECONDS
            for copier in copiers:
                copier.join(max(0.0, deadline - time.monotonic()))
        return EXIT_TIMEOUT if timed_out else self._worst

    def _name(self, rank: int) -> str:
        host, local_rank = divmod(rank, self._ranks_per_host)
        return f"{host}" if self._ranks_per_host == 1 else f"{host}.{local_rank}"

    def _copy_output(self, rank: int, process: subprocess.Popen[bytes]) -> list[threading.Thread]:
        assert process.stdout is not None
        assert process.stderr is not None
        mark = f"[h{self._name(rank)}] ".encode()
        pairs = ((process.stdout, sys.stdout.buffer), (process.stderr, sys.stderr.buffer))
        threads = [threading.Thread(target=_copy_lines, args=(*pair, mark), daemon=True) for pair in pairs]
        for thread in threads:
            thread.start()
        return threads

    def _watch(self, processes: Sequence[subprocess.Popen[bytes]]) -> bool:
        """Until all have ended, the time is up (True), or the grace after the first failure is over. Codes of
        processes that we ended ourselves do not count: the worst is of those that ended on their own."""
        end = None if self._timeout_seconds is None else time.monotonic() + self._timeout_seconds
        failure_end: float | None = None
        self._worst = 0
        running = dict(enumerate(processes))
        while running:
            for rank, process in list(running.items()):
                if (code := process.poll()) is None:
                    continue
                del running[rank]
                code = code if code >= 0 else 128 - code  # as a shell gives it
                self._worst = max(self._worst, code)
                if code != 0:
                    _report(f"host {self._name(rank)} {_describe(code)}")
                    failure_end = failure_end or time.monotonic() + self._grace_seconds
            now = time.monotonic()
            left = ", ".join(map(self._name, running))
            if running and end is not None and now > end:
                _report(f"hosts [{left}] still run after {self._timeout_seconds:g} s (--timeout); ending them")
                return True
            if running and failure_end is not None and now > failure_end:
                _report(f"hosts [{left}] still run {self._grace_seconds:g} s after the failure; ending them")
                return False
            if running:
                time.sleep(_POLL_SECONDS)
        return False

    def _end(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        for process in processes:
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + _TERMINATE_SECONDS
        for process in processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
