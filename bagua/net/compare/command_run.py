"""One run of the user's command: its output, how long it took, and what NCCL's log says about the network."""

from __future__ import annotations

import os
import selectors
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bagua.net.bench.nccl_ab.log import NetworkProof, read_proof, read_proof_file
from bagua.net.bench.process_tree import ended_with, running, start_command
from bagua.net.compare.job_traffic import JobTraffic
from bagua.net.compare.setting import Setting
from bagua.net.compare.traffic import NO_TRAFFIC, Traffic, TrafficMeter

# Enough for any training log; what is older than this is not needed for a median.
_MAX_LINES = 200_000
_MAX_LINE_BYTES = 8192
_TICK_S = 0.25
# A process that the command leaves behind may keep its output open.
_DRAIN_S = 1.0


class RunError(RuntimeError):
    """The command failed. The message has the end of its output."""


@dataclass(frozen=True)
class CommandRun:
    """
    Attributes:
        lines: of its standard output and error; a carriage return ends a line, too.
        proofs: one per process that has an NCCL log which names a network.
        wrote_nccl_log: whether NCCL wrote anything at all.
        job_bytes, middle_s: of the command's own TCP connections on this host, see JobTraffic.
    """

    setting: Setting
    round: int
    wall_s: float
    lines: Sequence[str]
    proofs: tuple[NetworkProof, ...] = ()
    wrote_nccl_log: bool = False
    traffic: Traffic = NO_TRAFFIC
    job_bytes: int = 0
    middle_s: float | None = None


def run_command(
    command: Sequence[str],
    setting: Setting,
    round_number: int,
    folder: Path,
    timeout_s: float,
    on_line: Callable[[str], None],
) -> CommandRun:
    """
    Args:
        folder: for the output and NCCL's logs.
        on_line: called for each line, and with "" about once a second.

    Raises:
        RunError: it cannot be started, exits with another code than 0, or is not done in time.
    """
    where = f"{setting.name}, round {round_number + 1}"
    environment = {
        **setting.environment,
        # The proof of the network in use. Where `folder` does not exist, on another host, NCCL logs to stdout.
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV",
        "NCCL_DEBUG_FILE": str(folder / "nccl.%h.%p.log"),
        # Or else a step that is printed is seen when a buffer is full.
        "PYTHONUNBUFFERED": "1",
    }
    began = time.monotonic()
    lines: deque[str] = deque(maxlen=_MAX_LINES)
    meter = TrafficMeter(began)
    try:
        with (
            running(lambda: start_command(command, environment, RunError)) as process,
            (folder / "output.txt").open("w", encoding="utf-8") as log,
        ):
            job = JobTraffic(process.pid, began)
            for line in _lines(process, began + timeout_s):
                meter.sample(time.monotonic())
                job.sample(time.monotonic())
                on_line(line or "")
                if line is not None:
                    lines.append(line)
                    log.write(line + "\n")
    except TimeoutError:
        raise RunError(
            f"{where}: not done after {timeout_s:.0f} s\n{ended_with(lines)}\n"
            "Raise --time-limit, or let it do fewer steps."
        ) from None
    wall_s = time.monotonic() - began
    if process.returncode != 0:
        code = process.returncode
        how = f"exit code {code}" if code > 0 else f"killed by signal {-code}"
        raise RunError(
            f"{where}: the command failed ({how})\n{ended_with(lines)}\nRun it without `bagua-net compare` first."
        )
    logs = sorted(folder.glob("nccl.*.log"))
    printed = [line for line in lines if " NCCL " in line]
    proofs = [*(read_proof_file(path) for path in logs), read_proof("\n".join(printed))]
    return CommandRun(
        setting,
        round_number,
        wall_s,
        lines,
        # A process without a communicator (torchrun itself) may have opened a log too.
        tuple(proof for proof in proofs if proof.network),
        any(path.stat().st_size for path in logs) or bool(printed),
        meter.result(),
        job.nbytes,
        job.middle_s(),
    )


def _lines(process: subprocess.Popen[bytes], deadline: float) -> Iterator[str | None]:
    """Each line of the output, and None every now and then, until the process has ended."""
    assert process.stdout is not None
    descriptor = process.stdout.fileno()
    os.set_blocking(descriptor, False)
    pending = b""
    ended_at: float | None = None
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while True:
            readable = selector.select(_TICK_S)
            data = os.read(descriptor, 1 << 16) if readable else None
            if data:
                *whole, pending = (pending + data).replace(b"\r", b"\n").split(b"\n")
                pending = pending[:_MAX_LINE_BYTES]
                for line in whole:
                    if line:
                        yield line[:_MAX_LINE_BYTES].decode(errors="replace")
            else:
                yield None
            now = time.monotonic()
            if process.poll() is not None:
                ended_at = now if ended_at is None else ended_at
            if data == b"" or (data is None and ended_at is not None and now - ended_at > _DRAIN_S):
                break
            if now > deadline:
                raise TimeoutError
    if pending:
        yield pending.decode(errors="replace")
    try:
        process.wait(max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise TimeoutError from None
