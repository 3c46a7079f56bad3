"""Settings of Bagua 0.9's autotune service, read from the environment at every call, and a helper of its launcher.

bagua.torch_api.env has them, too. Raises EnvironmentValueError, a ValueError, for an invalid value.
"""

from __future__ import annotations

import os
import socket

from bagua.env import EnvironmentValueError, read_switch, read_text
from bagua.launch_environment import read_integer

__all__ = [
    "find_free_network_port",
    "get_autotune_max_samples",
    "get_autotune_sampling_confidence_time_s",
    "get_autotune_server_wait_time",
    "get_autotune_warmup_time_s",
    "get_bagua_service_port",
    "get_is_output_autotune_log",
    "is_report_metrics_switch_on",
]

_MIN_SERVER_WAIT_S = 30


def find_free_network_port() -> int:
    """A TCP port of this host that nothing listens on now."""
    with socket.create_server(("", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


def get_bagua_service_port() -> int:
    """BAGUA_SERVICE_PORT of the autotune service; -1, any free port, if not set."""
    return read_integer("BAGUA_SERVICE_PORT", -1)


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
