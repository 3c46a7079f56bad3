"""Programs that end as a program does, with finalizers, threads and handlers of `atexit`, in processes that are forked
with torch imported, which takes most of the time of `python -c`."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

from support.forked_launcher import be_program, captured
from support.rank_server import die_with_parent
from support.ranks import run_ranks


def run_programs(ranks: int, text: str, *words: str, timeout: float = 120) -> list[subprocess.CompletedProcess[str]]:
    """
    Runs `python -c text words` in each rank.

    Args:
        timeout: seconds for all of it.
    """
    done = run_ranks(ranks, run_program, text, words, timeout=timeout)
    return [subprocess.CompletedProcess([text, *words], *one) for one in done]


def run_program(text: str, words: Sequence[str]) -> tuple[int, str, str]:
    """In a rank. Returns the exit status, and what was printed and told."""
    parent = os.getpid()
    with captured(1) as output, captured(2) as errors:
        child = os.fork()
        if child == 0:
            die_with_parent(parent)
            be_program(text, words)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status, output.read_text(), errors.read_text()
