"""A rank of `bagua-net test`: meets the others, and as rank 0 measures with them and tells the command the result."""

from __future__ import annotations

import importlib
import json
import math
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

from bagua.net import native, nccl_config_file
from bagua.net.activation import original_environment
from bagua.net.bench.driver import NetworkPath
from bagua.net.bench.errors import BenchError, UsageError
from bagua.net.bench.launch_environment import LaunchEnvironment, detect_launch
from bagua.net.bench.measurement import Case
from bagua.net.bench.nccl_ab.backend import Backend
from bagua.net.bench.nccl_ab.command import form
from bagua.net.bench.nccl_ab.processes import START_S, RankRequest, RankSettings
from bagua.net.bench.nccl_ab.session import NcclSession
from bagua.net.bench.paced_run import Pace, PacedRun
from bagua.net.bench.processes import LocalPlace
from bagua.net.bench.ranks import Ranks, follow, lead_ranks
from bagua.net.bench.rendezvous import Member
from bagua.net.compare.setting import Setting, default_settings
from bagua.net.network_test.command import Plan, emit
from bagua.net.network_test.verdict import SIZES, Job, Results, Turn, report, rows
from bagua.progress import Progress

# Of a command to the ranks, beyond what it is expected to take.
_TIMEOUT_S = 90.0
_MAX_ITERATIONS = 5000
_MAX_TRANSPORTS = 6


def main(arguments: Sequence[str]) -> int:
    """Errors are told in records. The exit code is 0 all the same: a launcher ends the other ranks when one of them
    fails, before rank 0 has told why."""
    plan = Plan(**json.loads(arguments[0]))
    emit("started")
    where = ""
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
        where = f"rank {launch.rank} (host {socket.gethostname()}): " if launch.rank else ""
        emit("failed" if _take_part(replace(launch, port_setting="MASTER_PORT"), plan) else "done")
    except (BenchError, UsageError, RuntimeError, OSError, ImportError) as error:
        emit("error", text=f"{where}{error}")
    return 0


def _take_part(launch: LaunchEnvironment, plan: Plan) -> int:
    settings = default_settings(original_environment())
    torch: Any = importlib.import_module("torch")
    distributed: Any = importlib.import_module("torch.distributed")
    facts = {
        "gpus": torch.cuda.device_count() if distributed.is_nccl_available() else 0,
        "unused_rdma": _unused_rdma(original_environment()),
    }
    backends = [Backend(one.name, "", environment=one.environment) for one in settings]
    with tempfile.TemporaryDirectory(prefix="bagua-net-test-") as logs:
        processes = RankSettings(backends, START_S, Path(logs), original_environment())

        def make(address: str, _local_ranks: int) -> tuple[LocalPlace, NetworkPath]:
            return LocalPlace(processes), NetworkPath(address, "")

        if launch.rank:
            return follow(launch, plan.wait_s, make, RankRequest, facts)
        ranks = lead_ranks(launch, plan.wait_s, lambda _: None, make, facts)
        with ranks:
            _measure(ranks, job_of(ranks.members), settings, backends, plan)
    return 0


def job_of(ranks: Sequence[Member]) -> Job:
    """
    Raises:
        BenchError: only some ranks have a GPU.
    """
    without = tuple(dict.fromkeys(one.host for one in ranks if not one.facts.get("gpus")))
    if without and any(one.facts.get("gpus") for one in ranks):
        raise BenchError(
            f"no GPU that torch can use on {', '.join(without)}, where other ranks have one\n"
            "Start ranks on GPU nodes only; check `python -c 'import torch; print(torch.cuda.device_count())'` there."
        )
    rdma = dict.fromkeys(f"host {one.host}: {up}" for one in ranks if (up := one.facts.get("unused_rdma")))
    return Job(len(ranks), len({one.identity for one in ranks}), "gloo" if without else "nccl", without, tuple(rdma))


def _unused_rdma(environment: dict[str, str]) -> str:
    config = nccl_config_file.read_settings(nccl_config_file.config_files(environment))
    return native.rdma_ports({one.name: one.value for one in config} | environment)[1]


def _measure(
    ranks: Ranks, job: Job, settings: tuple[Setting, Setting], backends: Sequence[Backend], plan: Plan
) -> None:
    # The plugin has no effect on gloo: one round shows that the nodes communicate.
    rounds = plan.rounds if job.backend == "nccl" else 1
    where = "1 host" if job.hosts == 1 else f"{job.hosts} hosts"
    times = "1 round" if rounds == 1 else f"{rounds} rounds"
    emit("said", text=f"{job.ranks} ranks on {where}, {job.backend}; {times} without and with the plugin")
    sessions = [NcclSession(backend) for backend in backends]
    device = "cuda" if job.backend == "nccl" else "cpu"
    if errors := form(sessions, ranks, device, "float32", _TIMEOUT_S):
        raise BenchError("\n".join(errors))
    results = measure(sessions, job, settings, replace(plan, rounds=rounds))
    emit("result", report=report(results), rows=rows(results))
    for session in sessions:
        session.leave(_TIMEOUT_S)


def measure(
    sessions: Sequence[NcclSession], job: Job, settings: tuple[Setting, Setting], plan: Plan, **options: Any
) -> Results:
    """`sessions`: without and with the plugin. `options`: of PacedRun."""
    results = Results(job, settings)
    cases = [Case("all_reduce", size) for size in SIZES]

    def stop_reason(done: int) -> str | None:
        emit("said", text=f"round {done} of {plan.rounds}: done")
        _fill(results, run, sessions)
        return "more cannot compare anything" if done == 1 and results.is_pointless() else None

    run = PacedRun(
        dict.fromkeys(cases, sessions),
        Pace(plan.rounds, _TIMEOUT_S, math.inf, plan.seconds, most=_MAX_ITERATIONS, verifies=False),
        lambda total: Progress(total, stream=StringIO()),
        stop_reason=stop_reason,
        **options,
    )
    run.run()
    _fill(results, run, sessions)
    return results


def _fill(results: Results, run: PacedRun, sessions: Sequence[NcclSession]) -> None:
    """The rounds until now, with what NCCL's logs and the counters of the interfaces say by now."""
    found = []
    for setting, session in enumerate(sessions):
        session.read_proofs(_TIMEOUT_S)
        networks = sorted({proof.network for proof in session.proofs if proof.network})
        transports = sorted({"/".join(one.split("/")[:2]) for proof in session.proofs for one in proof.transports})
        traffic = max(session.traffic(_TIMEOUT_S), key=lambda one: one.peak_bytes_per_s)
        log = tuple(networks), tuple(transports[:_MAX_TRANSPORTS]), results.job.backend == "nccl", traffic
        times = {case.bytes: run.turns.of(case, session.name) for case in run.turn_plans}
        for number in range(min(map(len, times.values()))):
            seconds = {size: samples[number].seconds for size, samples in times.items()}
            found.append(Turn(setting, number, seconds, *log))
    results.turns = sorted(found, key=lambda one: one.round)
