"""One run of the user's command: its output, how long it took, and what NCCL's log says about the network."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bagua.net.bench.nccl_log import NetworkProof, read_proof, read_proof_file
from bagua.net.bench.process_tree import ended_with, lines_of, running, start_command
from bagua.net.bench.traffic import NO_TRAFFIC, Traffic, TrafficMeter
from bagua.net.compare.job_traffic import JobTraffic
from bagua.net.compare.setting import Setting

# Enough for any training log; what is older than this is not needed for a median.
_MAX_LINES = 200_000


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
            for line in lines_of(process):
                meter.sample(time.monotonic())
                job.sample(time.monotonic())
                on_line(line or "")
                if line is not None:
                    lines.append(line)
                    log.write(line + "\n")
                if time.monotonic() > began + timeout_s:
                    raise TimeoutError
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
