"""Does the plugin library open, and is it the one that belongs to this package?"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bagua.net.doctor.finding import Finding, Section, fail, ok
from bagua.net.nccl_release import NEWEST_TABLE, OLDEST_TABLE
from bagua.net.plugin_setting import PLUGIN_NAME, PluginPathError, plugin_value
from bagua.version import __version__

_OPEN_TIMEOUT_S = 20.0
_TABLES = tuple(range(OLDEST_TABLE, NEWEST_TABLE + 1))
_REINSTALL = (
    "reinstall bagua: `pip install --force-reinstall --no-deps .` in the source tree, or with the wheel's file for `.`"
)
# Of the line with which the library reports that it is active.
_VERSION_TEXT = re.compile(rb"Bagua-Net (\d+\.\d+\.\d+[\w.+-]*) active")
# As NCCL opens it, in a process of its own: a library that crashes must not take the doctor down.
_OPEN = """
import _ctypes, ctypes, json, os, sys
try:
    library = ctypes.CDLL(sys.argv[1], mode=os.RTLD_NOW | os.RTLD_LOCAL)
except OSError as error:
    print(json.dumps({"error": str(error)}))
    sys.exit()
names = {}
for table in map(int, sys.argv[2:]):
    try:
        names[table] = ctypes.c_char_p.in_dll(library, f"ncclNetPlugin_v{table}").value.decode()
    except ValueError:
        pass
# [Note: opened again] NCCL 2.28 and 2.29 close the library with the last communicator, forget its path, and then open
# the default name. The loader takes what it still holds under that name, and looks in its directories otherwise.
_ctypes.dlclose(library._handle)
try:
    ctypes.CDLL(os.path.basename(sys.argv[1]))
    reopens = True
except OSError:
    reopens = False
print(json.dumps({"names": names, "reopens": reopens}))
"""


@dataclass(frozen=True)
class OpenedLibrary:
    names: dict[int, str] = field(default_factory=dict)  # table number -> the name that it tells NCCL
    reopens: bool = False  # see [Note: opened again]
    error: str = ""


def open_library(path: Path) -> OpenedLibrary:
    try:
        answer = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _OPEN, str(path), *map(str, _TABLES)],
            capture_output=True,
            text=True,
            timeout=_OPEN_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return OpenedLibrary(error=f"opening it did not end within {_OPEN_TIMEOUT_S:g} s")
    if answer.returncode != 0:
        said = (answer.stderr.strip().splitlines() or ["without a message"])[-1]
        return OpenedLibrary(error=f"opening it ended the process with code {answer.returncode}: {said}")
    told: dict[str, Any] = json.loads(answer.stdout)
    names = {int(table): name for table, name in told.get("names", {}).items()}
    return OpenedLibrary(names, told.get("reopens", False), told.get("error", ""))


def version_of_library(path: Path) -> str | None:
    found = _VERSION_TEXT.search(path.read_bytes())
    return None if found is None else found.group(1).decode()


def check_library(path: Path) -> Section:
    opened = open_library(path)
    version = version_of_library(path)
    findings = [_check_opened(path, opened), _check_version(version)]
    try:
        plugin_value(path)
    except PluginPathError as error:
        text, _, remedy = str(error).partition("; ")
        findings.append(fail(text, remedy))
    facts = {
        "path": str(path),
        "version": version,
        "tables": sorted(opened.names),
        "reopens_by_name": opened.reopens,
        "error": opened.error,
    }
    return Section("library", "Library", tuple(findings), facts)


def missing_library(message: str) -> Section:
    text, _, remedy = message.partition("; ")
    return Section("library", "Library", (fail(text, remedy),), {"path": None, "version": None, "tables": []})


def _check_opened(path: Path, opened: OpenedLibrary) -> Finding:
    if opened.error:
        return fail(f"{path} does not open: {opened.error}", _REINSTALL)
    missing = [table for table in _TABLES if table not in opened.names]
    if missing:
        return fail(f"{path} lacks NCCL's tables {', '.join(f'v{table}' for table in missing)}", _REINSTALL)
    strangers = sorted(set(opened.names.values()) - {PLUGIN_NAME})
    if strangers:
        return fail(f"{path} calls itself {strangers[0]!r} and not {PLUGIN_NAME}", _REINSTALL)
    return ok(f"{path} opens, with NCCL's tables v{OLDEST_TABLE} to v{NEWEST_TABLE}")


def _check_version(version: str | None) -> Finding:
    if version is None:
        return fail(f"the library does not tell its version, and the package is {__version__}", _REINSTALL)
    if version != __version__:
        return fail(f"the library is version {version}, and the package is {__version__}", _REINSTALL)
    return ok(f"library and package are version {version}")
