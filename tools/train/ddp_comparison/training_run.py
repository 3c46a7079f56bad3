"""One training run: a fresh torchrun of the example, its deadline and its end, and what it wrote."""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bagua.net.bench.nccl_ab.backend import Backend, worker_environment
from bagua.net.bench.nccl_ab.log import NetworkProof, read_proof_file
from bagua.net.bench.process_tree import last_words, running

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "ddp_train.py"

# Communicators are created and kernels chosen in these.
WARMUP_STEPS = 5


class RunError(RuntimeError):
    """A training run failed. Says which, and what it wrote last."""


@dataclass
class Training:
    """One run of the example."""

    backend: str
    round: int
    losses: list[float]
    step_seconds: list[float]
    samples_per_second: float
    replicas_agree: bool
    wall_seconds: float
    proofs: list[NetworkProof] = field(default_factory=list)

    @property
    def steady_step_seconds(self) -> list[float]:
        return self.step_seconds[min(WARMUP_STEPS, len(self.step_seconds) - 1) :]

    @property
    def step_ms(self) -> float:
        return statistics.median(self.steady_step_seconds) * 1e3


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def train_once(
    backend: Backend,
    round_number: int,
    arguments: argparse.Namespace,
    inherited: Mapping[str, str],
    *,
    timeout_s: float,
) -> Training:
    slug = "".join(letter if letter.isalnum() else "-" for letter in backend.name)
    folder: Path = arguments.output_dir / "logs" / f"{slug}.round{round_number}"
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob("*"):
        stale.unlink()
    environment = worker_environment(backend, inherited, tcp_only=arguments.tcp_only, debug_file=folder / "nccl.%p.log")
    result = folder / "training.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(arguments.nproc_per_node)]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(free_port()), str(EXAMPLE)]
    command += ["--model", arguments.model, "--steps", str(arguments.steps), "--batch-size", str(arguments.batch_size)]
    command += ["--dtype", arguments.dtype, "--seed", str(arguments.seed), "--backend", arguments.backend]
    command += ["--json", str(result), "--quiet"]
    if arguments.image_size is not None:
        command += ["--image-size", str(arguments.image_size)]
    output = folder / "output.txt"
    began = time.monotonic()
    with output.open("wb") as file:

        def start() -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment, start_new_session=True
            )

        try:
            with running(start) as process:
                code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise RunError(f"{backend.name}, round {round_number}: not done after {timeout_s:.0f} s") from None
    wall_seconds = time.monotonic() - began
    if code != 0 or not result.is_file():
        lines = output.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise RunError(
            f"{backend.name}, round {round_number}: exit code {code}; it ended with:\n" + "\n".join(last_words(lines))
        )
    document: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return Training(
        backend=backend.name,
        round=round_number,
        losses=document["losses"],
        step_seconds=document["step_seconds"],
        samples_per_second=document["samples_per_second"],
        replicas_agree=document["replicas_agree"],
        wall_seconds=wall_seconds,
        # A process without a communicator (torchrun itself) may have opened a log too.
        proofs=[proof for path in sorted(folder.glob("nccl.*.log")) if (proof := read_proof_file(path)).network],
    )
