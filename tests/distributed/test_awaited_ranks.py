"""Ranks that wait for others in init_process_group say for whom; whoever is only slow is named once, and joins."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.logged import Lines
from support.processes import wait_until
from support.ranks import device_for, run_ranks

import bagua.torch_api as bagua
from bagua.job import rendezvous


class FoundLines(Lines):
    """Also a file, for which other ranks can wait."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        super().__init__()

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        self.path.touch()


def _a_rank_that_imports_slowly(folder: str, late: int, told_by: int, in_time: bool) -> list[str]:
    rank = bagua.get_rank()
    device = device_for(rank)
    heard = FoundLines(f"{folder}/{rank}")
    if not in_time:
        rendezvous.TELL_S = 0.3
        if rank == late:
            wait_until(Path(folder, str(told_by)).exists, f"rank {told_by} tells")
    bagua.init_process_group()
    tensor = torch.tensor([rank], device=device)
    bagua.allreduce_inplace(tensor)
    assert tensor.item() == 3
    return heard.lines


def test_a_slow_rank_is_named_once_by_the_first_that_waits(tmp_path: Path) -> None:
    (told,), *others = run_ranks(3, _a_rank_that_imports_slowly, str(tmp_path), 2, 0, False)
    assert re.match(r"Rank 0 has waited \d+ s in init_process_group\(\) for (rank 2|ranks 1 and 2) of 3\. .*", told)
    assert others == [[], []]


def test_who_serves_the_store_is_named_once_on_each_node(tmp_path: Path) -> None:
    nodes = [{"LOCAL_RANK": "0"}, {"LOCAL_RANK": "0"}, {"LOCAL_RANK": "1"}]
    _, (told, *more), others = run_ranks(3, _a_rank_that_imports_slowly, str(tmp_path), 0, 1, False, env=nodes)
    assert "Rank 1 has waited 0.3 s in init_process_group() for rank 0, which is to listen at" in told
    assert "MASTER_ADDR:MASTER_PORT=127.0.0.1:" in told
    assert (more, others) == ([], [])


def test_nothing_is_said_of_ranks_that_come_in_time(tmp_path: Path) -> None:
    assert run_ranks(3, _a_rank_that_imports_slowly, str(tmp_path), 2, 0, True) == [[], [], []]


def _in_vain(message: str, meeting: str, path: str | None) -> None:
    """Real time, of this timeout: that a rank never comes has no event. Both ranks are there before it begins, so that
    only a machine that leaves one of them without the CPU for as long could name that one, too."""
    rank = int(os.environ["RANK"])
    device_for(rank)
    Path(meeting, str(rank)).touch()
    wait_until(Path(meeting, str(1 - rank)).exists, "the other rank")
    given = () if path is None else (dist.FileStore(path, 3), rank, 3, 3)
    with pytest.raises(dist.DistStoreError, match=message):
        bagua.init_process_group(*given, timeout=2.5)
    assert not dist.is_initialized()
    if path is None:
        wait_until(_both_are_done, "the other rank gave up")


def _both_are_done() -> bool:
    """Rank 0 serves the store of both."""
    from bagua.collectives import initialization

    ((store, _),) = initialization._stores.values()
    try:
        store.set(f"done {os.environ['RANK']}", "")
        return bool(os.environ["RANK"] == "1" or store.check(["done 1"]))
    except RuntimeError:  # rank 0 is gone, which does not matter to rank 1
        return True


def test_a_rank_that_never_starts_is_named_when_the_time_is_over(tmp_path: Path) -> None:
    message = r"Not all ranks have joined within the timeout of 2.5 s: rank 2 of 3\.\nRank [01] has waited"
    run_ranks(2, _in_vain, message, str(tmp_path), None, env={"WORLD_SIZE": "3"})


def test_also_with_a_store_of_the_user(tmp_path: Path) -> None:
    run_ranks(2, _in_vain, "within the timeout of 2.5 s: rank 2 of 3", str(tmp_path), str(tmp_path / "store"))


def test_ranks_that_disagree_about_their_number(tmp_path: Path) -> None:
    message = "rank 2 of 3; rank 1, which has WORLD_SIZE=2 instead of 3|rank 0, which has WORLD_SIZE=3 instead of 2"
    run_ranks(2, _in_vain, message, str(tmp_path), None, env=[{"WORLD_SIZE": "3"}, {"WORLD_SIZE": "2"}])
