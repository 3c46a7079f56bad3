"""Environment variables, read at every call: what the launcher says about this process, and Bagua's own settings.

Raises EnvironmentValueError, a ValueError, for an invalid value.
"""

from __future__ import annotations

import os
import socket

from bagua.engine.bucket_plan import DEFAULT_BUCKET_BYTES
from bagua.env import EnvironmentValueError, read_size, read_switch, read_text
from bagua.job import launch_environment
from bagua.job.launch_environment import read_integer

_MIN_SERVER_WAIT_S = 30


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


def find_free_network_port() -> int:
    """A TCP port of this host that nothing listens on now."""
    with socket.create_server(("", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


def get_bagua_service_port() -> int:
    """BAGUA_SERVICE_PORT of the autotune service; -1, any free port, if not set."""
    return read_integer("BAGUA_SERVICE_PORT", -1)


def get_autotune_level() -> int:
    """BAGUA_AUTOTUNE: 1 or more tunes the size of buckets; 0, if not set, does not."""
    return read_integer("BAGUA_AUTOTUNE", 0)


def get_autotune_max_samples() -> int:
    """BAGUA_AUTOTUNE_MAX_SAMPLES: how many settings are tried; 60 if not set."""
    return _read_positive("BAGUA_AUTOTUNE_MAX_SAMPLES", 60)


def get_autotune_sampling_confidence_time_s() -> float:
    """BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S: seconds for which a setting is measured; 5 if not set."""
    return _read_seconds("BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S", 5.0)


def get_autotune_warmup_time_s() -> float:
    """BAGUA_AUTOTUNE_WARMUP_TIME_S: seconds before the first measurement; 30 if not set."""
    return _read_seconds("BAGUA_AUTOTUNE_WARMUP_TIME_S", 30.0)


def get_autotune_server_wait_time() -> int:
    """BAGUA_AUTOTUNE_SERVER_WAIT_TIME: seconds to wait for the service to answer; 300 if not set, never below 30."""
    return max(_MIN_SERVER_WAIT_S, read_integer("BAGUA_AUTOTUNE_SERVER_WAIT_TIME", 300))


def get_is_output_autotune_log() -> bool:
    """BAGUA_IS_OUTPUT_AUTOTUNE_LOG: whether the service writes what it tried to a file."""
    return read_switch(os.environ, "BAGUA_IS_OUTPUT_AUTOTUNE_LOG") or False


def is_report_metrics_switch_on() -> bool:
    """BAGUA_REPORT_METRICS."""
    return read_switch(os.environ, "BAGUA_REPORT_METRICS") or False


def _read_positive(name: str, default: int) -> int:
    value = read_integer(name, default)
    if value < 1:
        raise EnvironmentValueError(f"{name}={value}: must be at least 1")
    return value


def _read_seconds(name: str, default: float) -> float:
    text = read_text(os.environ, name)
    try:
        value = default if text is None else float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise EnvironmentValueError(f"{name}={text}: must be a number of seconds, 0 or more")
    return value
