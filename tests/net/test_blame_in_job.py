"""The verdict that ranks gather by themselves: real ranks and a real store, with pages of which each test decides who
waits for whom."""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.logged import Lines
from support.ports import take_another_port
from support.processes import wait_until
from support.ranks import run_ranks
from support.ras_service import ras_service, report
from support.stats_page import Comm, page_bytes, page_of_this_process

from bagua.net.blame import start_in_job
from bagua.net.blame.collectives import described
from bagua.net.blame.in_job import InJobBlame

WORLD = 3
RECEIVE = 1
STALL_S = 20.0


class Rank:
    """A rank of a gloo job whose page shows for which rank it waits to receive."""

    def __init__(self, stack: ExitStack) -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        stack.callback(dist.destroy_process_group)
        self.number = dist.get_rank()
        self.page = stack.enter_context(page_of_this_process(page_bytes(rank=self.number, host="a")))
        self.pids: list[int] = [0] * WORLD
        dist.all_gather_object(self.pids, os.getpid())  # from here on, all ranks have a page
        self.said: list[str] = []
        self.blame = InJobBlame(STALL_S, self.said.append)

    def waits(self, target: int | None, age_s: float = 30) -> None:
        comms = []
        if target is not None:
            posted = int((time.monotonic() - age_s) * 1000)
            comms = [Comm(f"10.0.0.9:1 (host a, process {self.pids[target]})", direction=RECEIVE, posted_ms=[posted])]
        os.pwrite(self.page, page_bytes(comms, rank=self.number, host="a"), 0)

    def look_in_turn(self, count: int) -> str:
        """All ranks, one after the other, and again; what this one has written since."""
        import torch.distributed as dist

        for turn in range(count * WORLD):
            if turn % WORLD == self.number:
                self.blame.look()
            dist.barrier()
        said = "\n".join(self.said)
        self.said.clear()
        return said


def rounds() -> list[str]:
    with ExitStack() as stack:
        rank = Rank(stack)
        seen = []
        rank.waits(None)
        seen.append(rank.look_in_turn(4))  # nobody waits
        rank.waits({0: 2, 1: 0, 2: None}[rank.number], age_s=-0.004)
        seen.append(rank.look_in_turn(4))  # the clock that stamps requests is coarse: posted just now
        rank.waits({0: 2, 1: 0, 2: None}[rank.number], age_s=1)
        seen.append(rank.look_in_turn(4))  # or not for long
        rank.waits({0: 2, 1: 0, 2: None}[rank.number])
        seen.append(rank.look_in_turn(4))
        seen.append(rank.look_in_turn(4))  # for no longer than it has said
        rank.waits({0: 2, 1: 0, 2: None}[rank.number], age_s=100)
        seen.append(rank.look_in_turn(4))
        rank.waits(None)
        seen.append(rank.look_in_turn(4))
        rank.waits({0: None, 1: 0, 2: 0}[rank.number])  # and another time
        from bagua.job import computing

        step_s = computing.Computing(256, (1.8, 1.0, 1.04)[rank.number])
        computing.tell(lambda: step_s)
        seen.append(rank.look_in_turn(4))
        return seen


def test_rank_0_writes_one_verdict_for_all() -> None:
    first, *others = run_ranks(WORLD, rounds)
    assert others == [[""] * 8] * 2
    assert [bool(said) for said in first] == [False, False, False, True, False, True, False, True]
    assert first[3].startswith("rank 2 (host a, pid ")
    assert re.search(r"has not sent for 3\d s\. It runs, and waits for no other process over Bagua-Net", first[3])
    assert re.search(r"Others wait for it since 3\d s\. See what it does instead, on a: py-spy dump --pid", first[3])
    assert "rank 2 (host a, pid " in first[5]
    assert first[7].startswith("rank 0 (host a, pid ")
    assert "slower" not in "".join(first[:7])
    assert "\nrank 0 is 1.7 times slower at computing: see shares" in first[7]
    assert first[7].count("slower") == 1


def another_group() -> list[str]:
    import torch.distributed as dist

    with ExitStack() as stack:
        rank = Rank(stack)
        rank.waits({0: 2, 1: 0, 2: None}[rank.number])
        rank.look_in_turn(1)  # asked for and answered, not written
        take_another_port()
        dist.destroy_process_group()
        rank.waits(None)
        dist.init_process_group("gloo")
        seen = [rank.look_in_turn(8)]
        rank.waits({0: 2, 1: 0, 2: None}[rank.number])
        return [*seen, rank.look_in_turn(4)]


def test_what_was_asked_in_an_earlier_process_group_is_forgotten() -> None:
    first, *others = run_ranks(WORLD, another_group)
    assert others == [["", ""]] * 2
    assert first[0] == ""
    assert first[1].startswith("rank 2 (host a, pid ")


def one_is_stopped() -> list[str]:
    import torch.distributed as dist

    with ExitStack() as stack:
        rank = Rank(stack)
        rank.waits({0: 1, 1: 2, 2: None}[rank.number])
        dist.barrier()  # the first that looks reports the pages of all
        store = dist.distributed_c10d._get_default_store()
        if rank.number == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            status = Path(f"/proc/{rank.pids[2]}/status")
            wait_until(lambda: "State:\tT" in status.read_text(), "rank 2 is stopped")
            rank.blame.look()
            store.add("looked", 1)
            store.wait(["stopped"]) if rank.number else wait_until(lambda: store.add("looked", 0) == 2, "rank 1")
            for _ in range(5):
                rank.blame.look()
            if rank.number == 0:
                store.set("stopped", "")
                os.kill(rank.pids[2], signal.SIGCONT)
        dist.barrier()
        return rank.said


def test_a_rank_that_is_stopped_reports_nothing_and_is_seen_by_others_of_its_host() -> None:
    first, *others = run_ranks(WORLD, one_is_stopped)
    assert others == [[], []]
    [said] = first
    assert "is stopped, by SIGSTOP, a terminal or a debugger.\nOthers wait for it since " in said
    assert " s. Continue it on a" in said
    assert said.startswith("rank 2 (host a, pid ")


def rank_0_is_busy() -> list[str]:
    import torch.distributed as dist

    with ExitStack() as stack:
        rank = Rank(stack)
        rank.waits({0: None, 1: 2, 2: 1}[rank.number])
        dist.barrier()  # the first that looks reports the pages of all
        launched = dict.fromkeys(rank.pids[1:], 4)
        with ras_service(report(launched, {rank.pids[0]: 0})) as os.environ["NCCL_RAS_ADDR"]:
            for _ in range(10 * (rank.number > 0)):
                rank.blame.look()
        dist.barrier()
        return rank.said


def test_if_rank_0_does_not_answer_a_rank_that_waits_writes() -> None:
    first, *others = run_ranks(WORLD, rank_0_is_busy)
    assert first == []
    assert sorted(map(len, others)) == [0, 1]
    [said] = [one for said in others for one in said]
    assert said.startswith("ranks have waited for 20 s, for each other or for what Bagua-Net does not see")
    assert "\nrank 0 (10.0.0.2, pid " in said


def collectives() -> list[str]:
    import torch
    import torch.distributed as dist

    with ExitStack() as stack:
        rank = Rank(stack)
        work = None
        if rank.number < 2:
            rank.waits(2)
            work = dist.all_reduce(torch.ones(1), async_op=True)
        store = dist.distributed_c10d._get_default_store()
        for turn in range(4 * WORLD):  # no barrier: it would be behind the all-reduce
            if turn % WORLD == rank.number:
                rank.blame.look()
                store.add("turn", 1)
            wait_until(lambda turn=turn: store.add("turn", 0) > turn, "the turn")
        (work or dist.all_reduce(torch.ones(1), async_op=True)).wait()
        return rank.said


def test_the_collectives_of_all_ranks() -> None:
    [said], *_ = run_ranks(WORLD, collectives)
    assert "\neach of ranks 0 and 1 is in all_reduce, number 3 of default_pg\nrank 2 has finished all_gather, " in said


def test_ranks_of_the_same_collective_are_named_together() -> None:
    here = {"name": "all_reduce", "number": 7, "group": "default_pg", "finished": False}
    lines = described(dict.fromkeys((0, 1, 2, 5, 7, 8), here) | {3: {**here, "finished": True}, 4: None})
    assert lines == [
        "each of ranks 0 to 2, 5, 7 and 8 is in all_reduce, number 7 of default_pg",
        "rank 3 has finished all_reduce, number 7 of default_pg",
    ]
    assert described({0: None}) == []


def by_itself() -> list[str]:
    said = Lines(logger="bagua.net").lines
    start_in_job(os.environ)
    with ExitStack() as stack:
        import torch.distributed as dist

        rank = Rank(stack)
        rank.waits({0: 2, 1: None, 2: None}[rank.number])
        if rank.number == 0:
            wait_until(lambda: bool(said), "the verdict")
        dist.barrier()
    return said  # and the process ends while the thread runs


def test_a_job_that_does_nothing_for_it() -> None:
    [said], *others = run_ranks(WORLD, by_itself, env={"BAGUA_NET_STALL_S": "1"})
    assert said.startswith("Bagua-Net: rank 2 (host a, pid ")
    assert others == [[], []]


@pytest.mark.parametrize(
    ("variables", "is_started"),
    [
        ({"WORLD_SIZE": "2"}, True),
        ({"SLURM_NTASKS": "16"}, True),
        ({"WORLD_SIZE": "1"}, False),
        ({}, False),
        ({"WORLD_SIZE": "2", "BAGUA_NET_STALL_S": "0"}, False),
        ({"WORLD_SIZE": "2", "BAGUA_NET_STALL_S": "soon"}, False),
    ],
)
def test_ranks_of_jobs_look(variables: dict[str, str], is_started: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[float] = []
    monkeypatch.setattr("bagua.net.blame.in_job.start", started.append)
    start_in_job(variables)
    assert started == [30] * is_started
