"""Which rank of how many this process is, from the variables of torchrun, mpirun, srun or a PMI launcher.

Pure functions of a mapping. A process that no launcher started is a local run: it starts all ranks itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from bagua.launch_environment import LAUNCHERS, LauncherVariables
from bagua.net.bench.errors import UsageError

LOOPBACK = "127.0.0.1"
# Outside Linux's ephemeral range (32768..60999), so that no outgoing connection holds it.
DEFAULT_PORT = 29511
_SLURM_PORT_BASE = 20000
_SLURM_PORT_COUNT = 9000


@dataclass(frozen=True)
class LaunchEnvironment:
    """One process of a launched job."""

    launcher: str  # for messages: "torchrun", "Open MPI", "PMI", "Slurm"
    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None
    master_address: str
    port: int
    # What tells this job from another on the same hosts: a stranger's rank is turned away.
    job: str
    port_setting: str = "--port"  # for messages


_SLURM = LAUNCHERS[-1]
# An srun says how many tasks its step has, unless it is too old for that.
_LAUNCHERS = (*LAUNCHERS[:-1], _SLURM._replace(world_size="SLURM_STEP_NUM_TASKS"), _SLURM)


def detect_launch(environment: Mapping[str, str], *, port: int | None = None) -> LaunchEnvironment | None:
    """None when no launcher started this process."""
    for variables in _LAUNCHERS:
        if variables.rank in environment and variables.world_size in environment:
            break
    else:
        return None
    rank = _integer(environment, variables.rank)
    world_size = _integer(environment, variables.world_size)
    if world_size < 1 or not 0 <= rank < world_size:
        raise UsageError(
            f"{variables.launcher} says {variables.rank}={rank} of {variables.world_size}={world_size}; a rank is in"
            " 0..size-1: unset both for a run on this machine alone, or start all ranks with the launcher"
        )
    local_rank = _optional_integer(environment, variables.local_rank)
    local_world_size = _optional_integer(environment, variables.local_world_size)
    return LaunchEnvironment(
        launcher=variables.launcher,
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        master_address=_master_address(environment, variables, world_size, local_world_size),
        port=port if port is not None else _port(environment),
        job=_job(environment),
    )


def launch_of_run(
    environment: Mapping[str, str], *, local: bool, port: int | None, ranks: int | None
) -> LaunchEnvironment | None:
    """None if this process has to start all ranks itself. `ranks`: what the user asked for; raises UsageError if a
    launcher started another number."""
    launch = None if local else detect_launch(environment, port=port)
    if launch is None or launch.world_size == 1:
        return None
    if ranks not in (None, launch.world_size):
        raise UsageError(
            f"--ranks {ranks}, but {launch.launcher} started {launch.world_size} ranks; leave --ranks out, or give"
            " --local to run on this machine alone"
        )
    return launch


def _integer(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not re.fullmatch(r"\s*-?\d+\s*", text):
        raise UsageError(
            f"{name}={text!r} is not an integer; the launcher sets it, so unset it or start with a launcher"
        )
    return int(text)


def _optional_integer(environment: Mapping[str, str], name: str) -> int | None:
    return _integer(environment, name) if name and environment.get(name) else None


def _master_address(
    environment: Mapping[str, str], variables: LauncherVariables, world_size: int, local_world_size: int | None
) -> str:
    if environment.get("MASTER_ADDR"):
        return environment["MASTER_ADDR"]
    if world_size == 1 or local_world_size == world_size:
        return LOOPBACK
    node_list = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    if node_list:
        return first_host(node_list)
    raise UsageError(
        f"{variables.launcher} started {world_size} ranks, but MASTER_ADDR, the host of rank 0, is not set; pass it to"
        " every rank, for example: mpirun -x MASTER_ADDR=HOST ... or MASTER_ADDR=HOST srun ..."
    )


def _port(environment: Mapping[str, str]) -> int:
    if environment.get("MASTER_PORT"):
        master_port = _integer(environment, "MASTER_PORT")
        if not 1 <= master_port <= 65534:
            raise UsageError(f"MASTER_PORT={master_port} is outside 1..65534; choose another or give --port")
        # torchrun's own store listens on MASTER_PORT.
        return master_port + 1
    job = environment.get("SLURM_JOB_ID", "")
    # Two jobs of one node must not meet.
    return _SLURM_PORT_BASE + int(job) % _SLURM_PORT_COUNT if job.isdigit() else DEFAULT_PORT


def _job(environment: Mapping[str, str]) -> str:
    names = ("BAGUA_BENCH_SECRET", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID", "OMPI_MCA_ess_base_jobid")
    return "|".join(environment.get(name, "") for name in names)


def first_host(node_list: str) -> str:
    """Of a Slurm node list: gpu01 of "gpu[01-03,7],login". Leading zeros belong to the name."""
    host = re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", node_list).split(",")[0]
    if not re.fullmatch(r"[\w.-]+", host):
        raise UsageError(f"the Slurm node list {node_list!r} names no host; set MASTER_ADDR to the host of rank 0")
    return host
