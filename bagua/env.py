"""Reading of environment variables, by the same rules as the compiled library (net_plugin/config/plugin_config.cc):
values are trimmed, and a variable that is set to nothing counts as not set. No torch, no native import."""

from __future__ import annotations

import re
from collections.abc import Mapping

# The BAGUA_* variables of the Python package. BAGUA_NET_* are those of the compiled library.
SETTINGS = frozenset(
    {
        "BAGUA_AUTOTUNE",
        "BAGUA_BENCH_SECRET",
        "BAGUA_DEFAULT_BUCKET_SIZE",
        "BAGUA_DRIVER_LOG",
        "BAGUA_LOG_LEVEL",
    }
)
# Of Bagua 0.9: accepted, and ignored.
WITHOUT_EFFECT = frozenset(
    {
        "BAGUA_AUTOTUNE_MAX_SAMPLES",
        "BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S",
        "BAGUA_AUTOTUNE_SERVER_WAIT_TIME",
        "BAGUA_AUTOTUNE_WARMUP_TIME_S",
        "BAGUA_IS_OUTPUT_AUTOTUNE_LOG",
        "BAGUA_NODE_DOMAIN_NAMES",
        "BAGUA_REPORT_METRICS",
        "BAGUA_SERVICE_PORT",
        "BAGUA_SSH_PORT",
    }
)

_YES = frozenset({"1", "true", "yes", "on"})
_NO = frozenset({"0", "false", "no", "off"})
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


class EnvironmentValueError(ValueError):
    """A variable has an invalid value. The message names the variable, the value and what is allowed."""


def read_text(environment: Mapping[str, str], name: str) -> str | None:
    """The trimmed value, or None if the variable is unset or blank."""
    return environment.get(name, "").strip() or None


def read_switch(environment: Mapping[str, str], name: str) -> bool | None:
    """A boolean, or None if it is not set. Raises EnvironmentValueError for anything else."""
    text = read_text(environment, name)
    if text is None:
        return None
    word = text.lower()
    if word in _YES:
        return True
    if word in _NO:
        return False
    raise EnvironmentValueError(f"{name}={text}: must be 1, true, yes or on, or else 0, false, no or off")


def read_size(environment: Mapping[str, str], name: str) -> int | None:
    """A number of bytes, at least 1, with an optional suffix K, M or G (powers of 1024; KiB and KB mean the same); None
    if it is not set. Raises EnvironmentValueError for anything else."""
    text = read_text(environment, name)
    return None if text is None else size_of(name, text)


def size_of(name: str, text: str) -> int:
    """A number of bytes as in `read_size`.

    Args:
        name: What has this value, for the error.

    Raises:
        EnvironmentValueError: It is something else; a ValueError.
    """
    match = re.fullmatch(r"(\d+)\s*(?:([kmg])(?:i?b)?|b)?", text, re.IGNORECASE)
    size = int(match[1]) * _UNITS[(match[2] or "").lower()] if match else 0
    if size < 1:
        raise EnvironmentValueError(
            f"{name}={text}: must be a number of bytes, at least 1, optionally with a suffix K, M or G, such as 10M"
        )
    return size
