"""The types of the fixtures that start fresh processes; the fixtures themselves are in tests/net/conftest.py."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

# Importing torch takes seconds, and minutes on a machine where everything else is being built.
TIMEOUT_S = 240

Completed = subprocess.CompletedProcess[str]
BuildNccl = Callable[[int], Path]  # what its ncclGetVersion returns


class BuildLibrary(Protocol):
    def __call__(self, name: str, text: str, *options: str) -> Path: ...


class RunCommand(Protocol):
    def __call__(self, command: Sequence[str | Path], environment: Mapping[str, str]) -> Completed: ...


class RunPython(Protocol):
    def __call__(self, script: str, environment: Mapping[str, str], *options: str) -> Completed: ...


class RunNet(Protocol):
    def __call__(self, *words: object, **variables: str) -> Completed: ...
