"""How launchers name what they tell a process of its place in the job.

The plugin has the same table (net_plugin/os/launcher.cc). Processes look at this one before they know whether they need
the compiled library.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


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


def stated_local_rank(environment: Mapping[str, str]) -> str:
    """As it is written there; "": no launcher says."""
    return _first(environment, [names.local_rank for names in LAUNCHERS])


def stated_world_size(environment: Mapping[str, str]) -> str:
    """As it is written there; "": no launcher says."""
    return _first(environment, [names.world_size for names in LAUNCHERS])


def _first(environment: Mapping[str, str], names: list[str]) -> str:
    return next((environment[name].strip() for name in names if name in environment), "")
