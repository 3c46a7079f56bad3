"""The file that a report of a problem needs, without secrets: `bagua-net doctor --report`.

Left out are the values of variables that may hold a secret or an address, wherever they stand, and of BAGUA_* variables
that this version does not know; the id of the secret; the name of this host; and the home directory, as `~`.
"""

from __future__ import annotations

import os
import platform
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bagua.net import native, nccl_config_file
from bagua.net.doctor.finding import Report

LEFT_OUT = "(left out)"
_SHOWN = re.compile(r"BAGUA_|NCCL_|ENABLE_BAGUA_NET$")
_SENSITIVE = re.compile(r"SECRET|TOKEN|PASS|CREDENTIAL|AUTH|KEY|HOST|ADDR|COMM_ID|DOMAIN_NAMES")
_OF_THE_PACKAGE = ("BAGUA_LOG_LEVEL", "BAGUA_DEFAULT_BUCKET_SIZE", "BAGUA_AUTOTUNE", "BAGUA_DRIVER_LOG")
_LOGIN = re.compile(r"(?<=://)[^/@\s]+@")
_SHORTEST_SEARCHED = 4  # a shorter value would be found in unrelated words; it is left out with its name


def problem_report(report: Report, environment: Mapping[str, str]) -> dict[str, Any]:
    """
    Args:
        report: what the doctor found.
        environment: what a job would be started with.
    Returns:
        What `json.dumps` takes: the findings and facts of the report, versions, and the variables of Bagua and NCCL.
    """
    files = nccl_config_file.read_settings(nccl_config_file.config_files(environment))
    variables = [(name, value) for name, value in environment.items() if _SHOWN.match(name)]
    variables += [(setting.name, setting.value) for setting in files]
    known = {*_known_settings(), *_OF_THE_PACKAGE}
    hidden = {name: value for name, value in variables if _is_hidden(name, known)}
    values = {value for name, value in variables if name in hidden and len(value) >= _SHORTEST_SEARCHED}
    values |= {str(section.facts["key_id"]) for section in report.sections if section.facts.get("key_id")}
    replaced = dict.fromkeys(sorted(values, key=len, reverse=True), LEFT_OUT)
    if (host := socket.gethostname()) not in ("", "localhost"):
        replaced[host] = "this-host"
    if (home := str(Path.home())) != "/":
        replaced[home] = "~"
    found = {
        **report.as_json(),
        "machine": {
            "system": platform.platform(),
            "architecture": platform.machine(),
            "libc": " ".join(platform.libc_ver()),
            "python_version": platform.python_version(),
            "cpus_usable": len(os.sched_getaffinity(0)),
        },
        "variables": {name: value for name, value in environment.items() if _SHOWN.match(name)},
    }
    cleaned: dict[str, Any] = _cleaned(found, hidden, replaced)
    return cleaned


def _known_settings() -> set[str]:
    try:
        return {knob.name for knob in native.knobs()}
    except RuntimeError:
        return set()  # the section of the library says why


def _is_hidden(name: str, known: set[str]) -> bool:
    return bool(_SENSITIVE.search(name)) or (name.startswith("BAGUA_") and name not in known)


def _cleaned(value: Any, hidden: Mapping[str, str], replaced: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        for name, secret in hidden.items():
            value = value.replace(f"{name}={secret}", f"{name}={LEFT_OUT}")
        for text, instead in replaced.items():
            value = value.replace(text, instead)
        return _LOGIN.sub(f"{LEFT_OUT}@", value)
    if isinstance(value, Mapping):
        if value.get("name") in hidden:
            value = {**value, "value": LEFT_OUT}
        return {key: LEFT_OUT if key in hidden else _cleaned(part, hidden, replaced) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_cleaned(part, hidden, replaced) for part in value]
    return value
