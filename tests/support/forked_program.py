"""Programs that end as a program does, with finalizers, threads and handlers of `atexit`, in processes that are forked
with torch imported, which takes most of the time of `python -c`."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import types
import warnings
from typing import NoReturn

from support.forked_launcher import captured
from support.rank_server import die_with_parent
from support.ranks import run_ranks


def run_programs(ranks: int, text: str, *words: str, timeout: float = 120) -> list[subprocess.CompletedProcess[str]]:
    """
    Runs `python -c text words` in each rank.

    Args:
        timeout: seconds for all of it.
    """
    done = run_ranks(ranks, _run, text, words, timeout=timeout)
    return [subprocess.CompletedProcess([text, *words], *one) for one in done]


def _run(text: str, words: tuple[str, ...]) -> tuple[int, str, str]:
    parent = os.getpid()
    with captured(1) as output, captured(2) as errors:
        child = os.fork()
        if child == 0:
            die_with_parent(parent)
            _be_program(text, words)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status, output.read_text(), errors.read_text()


def _be_program(text: str, words: tuple[str, ...]) -> NoReturn:
    warnings.resetwarnings()  # a rank makes errors of them
    sys.argv = ["-c", *words]
    sys.modules["__main__"] = types.ModuleType("__main__")
    # The interpreter's own way: it keeps the exception that ends the program, and ends as it does at the end of `main`.
    failed = ctypes.pythonapi.PyRun_SimpleString(text.encode())
    ctypes.pythonapi.Py_Exit(int(failed != 0))
    raise AssertionError("the process has ended")
