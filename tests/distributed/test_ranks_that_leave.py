"""A rank that ended by itself, with fewer collectives than others, is told apart from one that crashed."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.forked_program import run_programs
from support.processes import wait_until
from support.ranks import run_ranks
from support.sweeps import rest_is_deep

import bagua.torch_api as bagua
from bagua.job import failure_report
from bagua.torch_api.communication import CollectiveError

LEAVER = 1


def check(told: str, ended_normally: bool) -> None:
    first, *_, advice, _ = told.splitlines()
    assert first.startswith(f"Rank {LEAVER} (host ")
    assert first.endswith(") ended (end of script or sys.exit), after fewer collectives than others.") == ended_normally
    assert advice.startswith(
        "If it had fewer batches, give all ranks equal numbers of batches, or use join() of bagua.torch_api."
        if ended_normally
        else f"Check the end of rank {LEAVER}'s log; if it shows no error, look for the OOM killer"
    )


# --- it destroys its group, and its process goes on -------------------------------------------------------------------


def fail_and_destroy_group(folder: str) -> str | None:
    failure_report.ROLL_CALL_S = 2.0
    bagua.init_process_group(timeout=60)
    tensor = torch.ones(1 << 16)
    bagua.allreduce_inplace(tensor)
    told = Path(folder, "told")
    if bagua.get_rank() == LEAVER:
        with contextlib.suppress(ValueError):
            try:
                raise ValueError("a batch that is broken")
            finally:
                dist.destroy_process_group()
                wait_until(told.exists, "the other rank")
        return None
    with pytest.raises(CollectiveError) as raised:
        bagua.allreduce_inplace(tensor)
    told.touch()
    assert raised.value.missing_ranks == (LEAVER,)
    return str(raised.value)


def test_a_rank_that_destroys_its_group_in_finally(tmp_path: Path) -> None:
    """It has not ended normally. Without an error: test_local_steps_failures.py."""
    told, _ = run_ranks(2, fail_and_destroy_group, str(tmp_path))
    check(told, ended_normally=False)


# --- its process ends -------------------------------------------------------------------------------------------------

PROGRAM = f"""
import sys
import torch
import bagua.torch_api as bagua
from bagua.job import failure_report

failure_report.ROLL_CALL_S = 2.0
bagua.init_process_group(timeout=60)
tensor = torch.ones(1 << 16)
bagua.allreduce_inplace(tensor)
if bagua.get_rank() != {LEAVER}:
    try:
        bagua.allreduce_inplace(tensor)
    except bagua.communication.CollectiveError as error:
        print(error, flush=True)
elif sys.argv[1] == "fails":
    raise ValueError("a batch that is broken")
"""


@pytest.mark.parametrize("end", rest_is_deep(["returns", "fails"], 0))
def test_a_rank_whose_process_ends(end: str) -> None:
    done = run_programs(2, PROGRAM, end)
    assert [one.returncode for one in done] == ([0, 0] if end == "returns" else [0, 1])
    check(done[1 - LEAVER].stdout.rstrip("\n"), ended_normally=end == "returns")
