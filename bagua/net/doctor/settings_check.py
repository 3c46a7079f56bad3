"""What is set, in the environment and in NCCL's configuration files, and is every value valid?"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from bagua.net import native
from bagua.net.doctor.finding import Section, Status, fail, ok, split_message, warn
from bagua.net.nccl_config_file import ConfigSetting

_PREFIXES = ("NCCL_", "BAGUA_NET_")
_NAMES = ("ENABLE_BAGUA_NET", "LD_LIBRARY_PATH", "LD_PRELOAD", "TORCH_DEVICE_BACKEND_AUTOLOAD")
_KNOB_PREFIXES = ("BAGUA_NET_", "ENABLE_BAGUA_NET")


def check_settings(environment: Mapping[str, str], config: Sequence[ConfigSetting], files: Sequence[Path]) -> Section:
    relevant = {name: _without_password(value) for name, value in sorted(environment.items()) if _is_relevant(name)}
    overridden = [setting for setting in config if setting.name in environment]
    effective = {setting.name: setting.value for setting in config} | dict(environment)
    findings = []
    try:
        findings += [fail(problem, remedy) for problem, remedy in native.invalid_knobs(effective)]
        findings += [warn(text, _remedy(text)) for text in native.unknown_knobs(effective)]
        if not findings:
            count = sum(name.startswith(_KNOB_PREFIXES) for name in effective)
            findings.append(ok(f"{count} of Bagua-Net's settings set, all valid" if count else "all at their defaults"))
    except RuntimeError as error:
        findings.append(split_message(Status.FAIL, str(error)))
    findings += [
        warn(f"{setting.name}={setting.value} in {setting.file} has no effect: the environment sets it, too")
        for setting in overridden
        if environment[setting.name] != setting.value
    ]
    # Values last: paths are long, and the last column is not padded.
    table = [(name, "environment", value) for name, value in relevant.items()]
    table += [
        (setting.name, str(setting.file), _without_password(setting.value))
        for setting in config
        if setting not in overridden
    ]
    facts = {
        "environment": relevant,
        "config_files": [str(file) for file in files],
        "config": [
            {"name": item.name, "value": _without_password(item.value), "file": str(item.file)} for item in config
        ],
    }
    head = (("variable", "set in", "value"),) if table else ()
    return Section("settings", "Settings", tuple(findings), facts, head + tuple(table))


def _remedy(text: str) -> str:
    if " has no effect in this version" in text:
        return "Unset it for the ranks."
    return "Correct its name or unset it. `bagua-net settings` lists all names."


def _without_password(value: str) -> str:
    """USER:PASSWORD@HOST:PORT, as in BAGUA_NET_PROMETHEUS_ADDRESS: a report is shown to others."""
    return _PASSWORD.sub(r"\1:...@", value)


_PASSWORD = re.compile(r"((?:^|//)[^:/@\s]*):.*@")


def _is_relevant(name: str) -> bool:
    return name.startswith(_PREFIXES) or name in _NAMES
