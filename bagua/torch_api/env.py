"""Environment variables, read at every call: what the launcher says about this process, and Bagua's own settings.

Raises EnvironmentValueError, a ValueError, for an invalid value.
"""

from __future__ import annotations

import os

from bagua import launch_environment
from bagua.engine.bucket_plan import DEFAULT_BUCKET_BYTES
from bagua.env import read_size
from bagua.launch_environment import read_integer


def get_world_size() -> int:
    """WORLD_SIZE, the number of processes; 1 without a launcher."""
    return launch_environment.world_size()


def get_rank() -> int:
    """RANK, of this process; 0 without a launcher."""
    return launch_environment.rank()


def get_local_rank() -> int:
    """LOCAL_RANK, on this node; 0 without a launcher."""
    return launch_environment.local_rank()


def get_local_size() -> int:
    """LOCAL_WORLD_SIZE, the number of processes on this node; 1 without a launcher."""
    return launch_environment.local_world_size()


def get_node_rank() -> int:
    """GROUP_RANK where torchrun started the process, else NODE_RANK; 0 if not set."""
    return launch_environment.node_rank()


def get_master_addr() -> str:
    """MASTER_ADDR, where rank 0 listens; 127.0.0.1 if not set."""
    return launch_environment.master_address()


def get_default_bucket_size() -> int:
    """BAGUA_DEFAULT_BUCKET_SIZE in bytes, optionally with a suffix K, M or G (KiB, MiB, GiB). If it is not set, 50 MiB;
    then buckets on CPUs have 25 MiB, and the first bucket of a module 1 MiB, unless the module is on CPUs and fits into
    one."""
    size = read_size(os.environ, "BAGUA_DEFAULT_BUCKET_SIZE")
    return DEFAULT_BUCKET_BYTES if size is None else size


def get_autotune_level() -> int:
    """BAGUA_AUTOTUNE: 1 or more tunes the size of buckets; 0, if not set, does not."""
    return read_integer("BAGUA_AUTOTUNE", 0)
