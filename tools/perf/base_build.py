"""The base's libnccl-net.so: exported with git, built as the wheel builds it, kept by commit.

Only the plugin is built, because the driver is the installed one for both: what differs is the library alone.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from bagua.net.bench.api import BenchError, running
from bagua.net.library import LIBRARY_NAME

from .base_commit import BaseCommit

TARGET = "nccl-net"
BUILD_TIMEOUT_S = 900.0
# scikit-build-core's own default.
_DEFAULT_BUILD_TYPE = "Release"
_LOG_TAIL_LINES = 25
# What CMake reads from the environment; pip's build sees the same.
_COMPILER_VARIABLES = ("CXX", "CXXFLAGS", "LDFLAGS")


@dataclass(frozen=True)
class BuiltLibrary:
    path: Path
    was_cached: bool


def build_base(repository: Path, base: BaseCommit, cache: Path, environment: Mapping[str, str]) -> BuiltLibrary:
    """
    Raises:
        BenchError: the commit cannot be exported, or does not build; with the tail of the log.
    """
    folder = cache / base.sha
    library, record = folder / LIBRARY_NAME, folder / "built-with.json"
    compiler = _compiler(environment)
    if library.is_file() and _recorded(record) == compiler:
        return BuiltLibrary(library, True)
    # One that was interrupted or built otherwise.
    shutil.rmtree(folder, ignore_errors=True)
    source, build = folder / "source", folder / "build"
    source.mkdir(parents=True)
    with (folder / "build.log").open("wb") as log:
        _export(repository, base, source, log)
        options = [f"-DCMAKE_BUILD_TYPE={build_type(source)}", "-DBAGUA_BUILD_PYTHON=OFF", "-DBAGUA_BUILD_TESTS=OFF"]
        ninja = _program("ninja", environment)
        configure = [_program("cmake", environment), "-S", str(source), "-B", str(build), "-G", "Ninja"]
        _run([*configure, f"-DCMAKE_MAKE_PROGRAM={ninja}", *options], base, log, environment)
        _run([configure[0], "--build", str(build), "--target", TARGET], base, log, environment)
    built = sorted(build.rglob(LIBRARY_NAME))
    if not built:
        raise BenchError(f"{base.name}: the target {TARGET} built no {LIBRARY_NAME}; choose a later base")
    built[0].replace(library)
    # The object files are many times the library, and a commit never changes.
    shutil.rmtree(build)
    record.write_text(json.dumps(compiler, indent=2) + "\n", encoding="utf-8")
    return BuiltLibrary(library, False)


def build_type(source: Path) -> str:
    """As the wheel of that commit is built: a release that was built otherwise was also used otherwise."""
    try:
        settings = tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return _DEFAULT_BUILD_TYPE
    ours = settings.get("tool", {}).get("scikit-build", {})
    dotted = ours.get("cmake.build-type", ours.get("cmake", {}).get("build-type", _DEFAULT_BUILD_TYPE))
    return str(dotted)


def _compiler(environment: Mapping[str, str]) -> dict[str, str]:
    """What a kept library depends on beside its commit."""
    command = environment.get("CXX", "c++").split()
    try:
        told = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, timeout=60, env=dict(environment)
        )
    except (OSError, IndexError, subprocess.TimeoutExpired) as error:
        raise BenchError(
            f"the C++ compiler {environment.get('CXX', 'c++')!r} cannot be run ({error}); install one or set CXX"
        ) from error
    settings = {name: environment.get(name, "") for name in _COMPILER_VARIABLES}
    return {"compiler": told.stdout.split("\n", 1)[0], **settings}


def _recorded(record: Path) -> object:
    try:
        return json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _program(name: str, environment: Mapping[str, str]) -> str:
    """Beside this interpreter first: the versions of constraints.txt."""
    search = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
    found = shutil.which(name, path=search)
    if found is None:
        raise BenchError(
            f"{name} is neither in {str(Path(sys.executable).parent)!r} nor on the PATH; run: make install"
        )
    return found


def _export(repository: Path, base: BaseCommit, source: Path, log: IO[bytes]) -> None:
    archive = source.with_suffix(".tar")
    _run(["git", "-C", str(repository), "archive", "--output", str(archive), base.sha], base, log, os.environ)
    # Not tarfile: its filter for safe extraction is missing in early 3.11.
    _run(["tar", "-xf", str(archive), "-C", str(source)], base, log, os.environ)
    archive.unlink()


def _run(command: Sequence[str], base: BaseCommit, log: IO[bytes], environment: Mapping[str, str]) -> None:
    log.write(f"$ {' '.join(command)}\n".encode())
    log.flush()
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
    try:
        with running(
            lambda: subprocess.Popen(command, env=dict(environment), start_new_session=True, **options)
        ) as process:
            code = process.wait(BUILD_TIMEOUT_S)
    except OSError as error:
        raise BenchError(f"{command[0]} cannot be started ({error.strerror}); install it") from error
    except subprocess.TimeoutExpired as error:
        raise BenchError(f"{base.name}: {command[0]} took more than {BUILD_TIMEOUT_S:g} s; see {log.name}") from error
    if code != 0:
        tail = "\n".join(Path(log.name).read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:])
        raise BenchError(
            f"{base.name} ({base.sha[:10]}) does not build: {Path(command[0]).name} exited with {code}; the end of"
            f" {log.name}:\n{tail}\nChoose another base, or a compiler that builds it (CXX)."
        )
