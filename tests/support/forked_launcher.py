"""Launchers in a process that is forked with torch imported, which takes most of the time of `python -m`.

The processes that a launcher starts are new ones, as ever. Each launcher has one test that starts it as users do.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from support.ranks import run_ranks


def run_launcher(
    module: str, words: Sequence[str], folder: Path, environment: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """
    Args:
        module: has `main`, which takes the words of the command line.
        folder: in which it runs.
    """
    (done,) = run_ranks(1, _launch, module, list(words), str(folder), dict(environment), timeout=timeout)
    return subprocess.CompletedProcess([module, *words], *done)


def _launch(module: str, words: list[str], folder: str, environment: dict[str, str]) -> tuple[int, str, str]:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    warnings.resetwarnings()  # a rank makes errors of them
    with captured(1) as output, captured(2) as errors:
        status = _status(module, words)
    return status, output.read_text(), errors.read_text()


def _status(module: str, words: list[str]) -> int:
    try:
        return int(importlib.import_module(module).main(words) or 0)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except Exception:
        traceback.print_exc()
        return 1


@contextlib.contextmanager
def captured(descriptor: int) -> Iterator[Path]:
    """The file to which all goes that this process and those that it starts write."""
    path = Path(f"/proc/self/fd/{os.memfd_create('printed')}")
    before = os.dup(descriptor)
    os.dup2(int(path.name), descriptor)
    try:
        yield path
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(before, descriptor)
