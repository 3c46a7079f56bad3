"""What a launcher tells a process through its environment: the one place in Python that names its variables. Read at
every call: programs change it after the import.

Two questions are asked. Training asks torchrun's variables alone, as torch's rendezvous does, and refuses what is no
number (`rank`, `world_size` and so on). Whoever only reports, as the plugin, believes any launcher (`job_position`);
net_plugin/os/launcher.cc answers this for C++, and tests/net/test_core_bindings.py compares the two.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from bagua.env import EnvironmentValueError, read_text


class LauncherVariables(NamedTuple):
    launcher: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str  # "": it says so in another form


# In the order in which they are looked for: mpirun inside a Slurm allocation leaves the SLURM_PROCID of its own daemon
# in the environment.
LAUNCHERS = (
    LauncherVariables("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    LauncherVariables(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    LauncherVariables("PMI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    LauncherVariables("Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", ""),
)

_MAX_LOCAL_RANKS = 4096  # more are a misread variable
_TORCHRUN_VARIABLES = ("RANK", "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# How many processes srun and mpirun have started; their other variables have other names than torchrun's, too.
_FOREIGN_SIZES = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


class JobPosition(NamedTuple):
    """None: no launcher says."""

    rank: int | None
    world_size: int | None
    local_rank: int | None
    local_world_size: int | None


def job_position(environment: Mapping[str, str]) -> JobPosition:
    """Each of them of the first launcher that gives a number."""

    def first(names: list[str], least: int = 0, most: int = (1 << 31) - 1) -> int | None:
        texts = [read_text(environment, name) or "" for name in names]
        numbers = [int(text) for text in texts if re.fullmatch("[0-9]+", text)]
        return next((number for number in numbers if least <= number <= most), None)

    _, rank, world_size, local_rank, local_world_size = map(list, zip(*LAUNCHERS, strict=True))
    return JobPosition(first(rank), first(world_size), first(local_rank), first(local_world_size, 1, _MAX_LOCAL_RANKS))


def read_integer(name: str, default: int) -> int:
    """Raises EnvironmentValueError for a value that is no decimal integer."""
    text = read_text(os.environ, name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise EnvironmentValueError(f"{name}={text}: must be an integer") from None


def rank() -> int:
    return read_integer("RANK", 0)


def world_size() -> int:
    return read_integer("WORLD_SIZE", 1)


def local_rank() -> int:
    return read_integer("LOCAL_RANK", 0)


def local_world_size() -> int:
    return read_integer("LOCAL_WORLD_SIZE", 1)


def master_address() -> str:
    return read_text(os.environ, "MASTER_ADDR") or "127.0.0.1"


def master_port() -> int:
    """0 if it is not set. Raises EnvironmentValueError for what is no port."""
    port = read_integer("MASTER_PORT", 0)
    if not 0 <= port <= 65535:
        raise EnvironmentValueError(f"MASTER_PORT={port}: must be from 1 to 65535, a port of rank 0's host")
    return port


def check_not_started_alike() -> None:
    """Raises ValueError if a launcher has started several processes without telling them what torchrun tells: each
    would train alone, as rank 0 of 1."""
    if is_set("WORLD_SIZE"):
        return
    for name in _FOREIGN_SIZES:
        if is_set(name) and read_integer(name, 1) > 1:
            raise ValueError(
                f"WORLD_SIZE is not set, and {name}={os.environ[name]}: so many processes were started, and each would"
                " train alone. Start torchrun on each node, or export RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,"
                " MASTER_ADDR and MASTER_PORT in each process (docs/how-to/launch.md); WORLD_SIZE=1 if alone is meant"
            )


def torchrun_attempt() -> str | None:
    """The number of torchrun's attempt if its agent serves the store at MASTER_ADDR and MASTER_PORT, else None."""
    served = read_text(os.environ, "TORCHELASTIC_USE_AGENT_STORE") == "True"
    return read_text(os.environ, "TORCHELASTIC_RESTART_COUNT") if served else None


def take_rank_token() -> str | None:
    """By which `bagua.distributed.run --regroup` knows this process: RANK_TOKEN, of its agent. Taken out of the
    environment: what this process starts is another one."""
    return os.environ.pop("RANK_TOKEN", None) or None


def is_set(name: str) -> bool:
    return read_text(os.environ, name) is not None


def stated_node_rank() -> int | None:
    """The node's number if the launcher says it: GROUP_RANK as torchrun sets it, else NODE_RANK."""
    name = "GROUP_RANK" if all(map(is_set, _TORCHRUN_VARIABLES)) else "NODE_RANK"
    return read_integer(name, 0) if is_set(name) else None


def node_rank() -> int:
    return stated_node_rank() or 0
