"""What is set, in the environment and in NCCL's configuration files, and is every value valid?"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from bagua.net import native
from bagua.net.doctor.finding import Section, Status, ok, split_message, warn
from bagua.net.nccl_config_file import ConfigSetting

_PREFIXES = ("NCCL_", "BAGUA_NET_")
_NAMES = ("ENABLE_BAGUA_NET", "LD_LIBRARY_PATH", "LD_PRELOAD", "TORCH_DEVICE_BACKEND_AUTOLOAD")
# The library joins its complaints by semicolons, and uses those inside of one, too; each starts with NAME=VALUE.
_NEXT_COMPLAINT = re.compile(r"; (?=[A-Z_]+=)")
_KNOB_PREFIXES = ("BAGUA_NET_", "ENABLE_BAGUA_NET")


def check_settings(environment: Mapping[str, str], config: Sequence[ConfigSetting], files: Sequence[Path]) -> Section:
    relevant = {name: value for name, value in sorted(environment.items()) if _is_relevant(name)}
    overridden = [setting for setting in config if setting.name in environment]
    effective = {setting.name: setting.value for setting in config} | dict(environment)
    findings = []
    try:
        invalid = native.invalid_knobs(effective)
        findings += [split_message(Status.FAIL, _with_remedy(text)) for text in _NEXT_COMPLAINT.split(invalid) if text]
        unknown = native.unknown_knobs(effective)
        findings += [warn(text, "unset it, or correct its name; `bagua-net knobs` lists all") for text in unknown]
        if not findings:
            count = sum(name.startswith(_KNOB_PREFIXES) for name in effective)
            findings.append(
                ok(f"{count} of Bagua-Net's variables set, all valid" if count else "all at their defaults")
            )
    except RuntimeError as error:
        findings.append(split_message(Status.FAIL, str(error)))
    findings += [
        warn(f"{setting.name}={setting.value} in {setting.file} has no effect: the environment sets it, too")
        for setting in overridden
        if environment[setting.name] != setting.value
    ]
    table = [(name, value, "environment") for name, value in relevant.items()]
    table += [(setting.name, setting.value, str(setting.file)) for setting in config if setting not in overridden]
    facts = {
        "environment": relevant,
        "config_files": [str(file) for file in files],
        "config": [{"name": item.name, "value": item.value, "file": str(item.file)} for item in config],
    }
    head = (("variable", "value", "set in"),) if table else ()
    return Section("settings", "Settings", tuple(findings), facts, head + tuple(table))


def _is_relevant(name: str) -> bool:
    return name.startswith(_PREFIXES) or name in _NAMES


def _with_remedy(text: str) -> str:
    return text if "; " in text else f"{text}; correct it or unset it (`bagua-net knobs` lists what is allowed)"
