"""What a launcher tells a process through its environment. Read at every call: programs change it after the import."""

from __future__ import annotations

import os

from bagua.env import EnvironmentValueError, read_text

_TORCHRUN_VARIABLES = ("RANK", "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# How many processes srun and mpirun have started; their other variables have other names than torchrun's, too.
_FOREIGN_SIZES = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


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


def is_set(name: str) -> bool:
    return read_text(os.environ, name) is not None


def stated_node_rank() -> int | None:
    """The node's number if the launcher says it: GROUP_RANK as torchrun sets it, else NODE_RANK."""
    name = "GROUP_RANK" if all(map(is_set, _TORCHRUN_VARIABLES)) else "NODE_RANK"
    return read_integer(name, 0) if is_set(name) else None


def node_rank() -> int:
    return stated_node_rank() or 0
