"""A rank of a trial: meets the other ranks, starts a worker for each turn, and, as rank 0, tells the command."""

from __future__ import annotations

import contextlib
import importlib
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bagua.net.activation import original_environment
from bagua.net.bench.errors import BenchError, UsageError
from bagua.net.bench.launch_environment import detect_launch
from bagua.net.bench.nccl_ab.log import read_proof_file
from bagua.net.bench.process_tree import last_words
from bagua.net.bench.rendezvous import host_identity
from bagua.net.compare.setting import Setting, default_settings
from bagua.net.compare.traffic import Traffic, TrafficMeter
from bagua.net.trial import records
from bagua.net.trial.meeting import Meeting, RelayedError
from bagua.net.trial.plan import SIZES, TURN_S, Plan
from bagua.net.trial.records import Job, Turn
from bagua.net.trial.verdict import Results
from bagua.net.trial.worker import Order

_TICK_S = 0.1
# Of a collective: less than a turn may take, so that the rank that waits says so itself.
_COLLECTIVE_S = 90.0
_MAX_TRANSPORTS = 6


def main(arguments: Sequence[str]) -> int:
    """Errors are told in records. The exit code is 0 all the same: a launcher ends the other ranks when one of them
    fails, before rank 0 has told why."""
    plan = Plan.of_argument(arguments[0])
    records.emit("started")
    meeting: Meeting | None = None
    try:
        launch = detect_launch(original_environment())
        if launch is None:
            raise BenchError(
                "the command started a rank without telling its number\n"
                "Write a launcher after `--`: torchrun, srun or mpirun, with its options."
            )
        if launch.world_size == 1:
            raise BenchError(
                f"{launch.launcher} started a single rank, which sends nothing\n"
                "Start one rank on each of two nodes: torchrun --nnodes 2 --nproc-per-node 1 ..."
            )
        meeting = Meeting(launch, plan.wait_s)
        _run(meeting, plan)
        meeting.leave()
    except (BenchError, UsageError, RuntimeError, OSError, ImportError) as error:
        text = str(error)
        if meeting is not None:
            if not isinstance(error, RelayedError):
                text = f"rank {meeting.launch.rank} (host {socket.gethostname()}): {text}"
            # The store of a rank 0 that has ended is of no more use.
            with contextlib.suppress(RuntimeError):
                meeting.fail(text)
                meeting.leave()
        records.emit("error", text=text)
        return 0
    records.emit("done")
    return 0


def _run(meeting: Meeting, plan: Plan) -> None:
    rank = meeting.launch.rank
    settings = default_settings(original_environment())
    torch: Any = importlib.import_module("torch")
    distributed: Any = importlib.import_module("torch.distributed")
    gpus = torch.cuda.device_count() if distributed.is_nccl_available() else 0
    mine = {"host": socket.gethostname(), "identity": host_identity(), "gpus": gpus}
    ranks = meeting.gather("facts", mine, plan.wait_s)
    job = job_of(ranks)
    results = Results(job, settings)
    on_this_host = [number for number, one in enumerate(ranks) if one["identity"] == mine["identity"]]
    device = on_this_host.index(rank) % gpus if gpus else 0
    if rank == 0:
        records.emit("job", **asdict(job))
    for number in range(plan.rounds_of(job.backend)):
        for index in (0, 1) if number % 2 == 0 else (1, 0):
            name = f"round{number}-{index}"
            order = Order(
                name=name,
                rank=rank,
                ranks=job.ranks,
                address=meeting.launch.master_address,
                port=meeting.launch.port,
                backend=job.backend,
                device=device,
                sizes=SIZES,
                seconds=plan.seconds,
                timeout_s=_COLLECTIVE_S,
            )
            mine = _take_turn(meeting, order, settings[index])
            turn = turn_of(index, number, meeting.gather(name, mine, TURN_S))
            if rank == 0:
                records.emit("turn", **asdict(turn))
                results.turns.append(turn)
        if meeting.decide(f"stop{number}", rank == 0 and results.is_pointless(), plan.wait_s):
            break


def job_of(ranks: Sequence[dict[str, Any]]) -> Job:
    """
    Raises:
        BenchError: only some ranks have a GPU.
    """
    without = tuple(dict.fromkeys(one["host"] for one in ranks if not one["gpus"]))
    if without and any(one["gpus"] for one in ranks):
        raise BenchError(
            f"no GPU that torch can use on {', '.join(without)}, where other ranks have one\n"
            "Start ranks on GPU nodes only; check `python -c 'import torch; print(torch.cuda.device_count())'` there."
        )
    hosts = len({one["identity"] for one in ranks})
    return Job(len(ranks), hosts, "gloo" if without else "nccl", without)


def turn_of(setting: int, number: int, ranks: Sequence[dict[str, Any]]) -> Turn:
    """What all ranks have in common in a turn; the times are the same on all."""
    networks = sorted({one["network"] for one in ranks if one["network"]})
    transports = sorted({name for one in ranks for name in one["transports"]})
    traffic = max((Traffic(**one["traffic"]) for one in ranks), key=lambda one: one.peak_bytes_per_s)
    seconds = {int(size): value for size, value in ranks[0]["seconds"].items()}
    wrote = any(one["wrote_nccl_log"] for one in ranks)
    return Turn(setting, number, seconds, tuple(networks), tuple(transports[:_MAX_TRANSPORTS]), wrote, traffic)


def _take_turn(meeting: Meeting, order: Order, setting: Setting) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="bagua-net-test-") as folder:
        log = Path(folder, "nccl.log")
        environment = {
            **setting.environment,
            "NCCL_DEBUG": "INFO",
            "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV",
            "NCCL_DEBUG_FILE": str(log),
        }
        command = [sys.executable, "-P", "-m", "bagua.net.trial.worker", order.as_argument()]
        meter = TrafficMeter(time.monotonic())
        deadline = time.monotonic() + TURN_S
        with Path(folder, "output").open("w+b") as output:
            worker = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
            )
            try:
                while worker.poll() is None:
                    time.sleep(_TICK_S)
                    meter.sample(time.monotonic())
                    meeting.check()
                    if time.monotonic() > deadline:
                        raise BenchError(f"with {setting.name}, the measurement was not done within {TURN_S:g} s")
            finally:
                worker.kill()
                worker.wait()
            output.seek(0)
            lines = output.read().decode(errors="replace").splitlines()
        proof = read_proof_file(log)
        found = _answer(lines)
        if "seconds" not in found:
            raise BenchError(_failure(setting, found.get("error"), lines, proof.warnings, worker.returncode))
        return {
            "seconds": found["seconds"],
            "network": proof.network,
            "transports": sorted({"/".join(name.split("/")[:2]) for name in proof.transports}),
            "wrote_nccl_log": log.exists() and log.stat().st_size > 0,
            "traffic": asdict(meter.result()),
        }


def _answer(lines: Sequence[str]) -> dict[str, Any]:
    for line in reversed(lines):
        try:
            answer = json.loads(line)
        except ValueError:
            continue
        if isinstance(answer, dict):
            return answer
    return {}


def _failure(
    setting: Setting, error: str | None, lines: Sequence[str], warnings: Sequence[str], code: int | None
) -> str:
    """NCCL's own warnings say more than torch's exception does."""
    words = [*warnings] or ([error] if error else last_words(lines)) or [f"no output, exit code {code}"]
    return f"with {setting.name}, the all-reduce failed:\n" + "\n".join(f"  {line}" for line in words)
