"""Ranks that run different code are told so, on each of them; those that are only late are accused of nothing."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.logged import Lines
from support.processes import wait_until
from support.rank_tests import on_ranks
from support.training import begin, mlp, momentum

import bagua.torch_api as bagua
from bagua.collectives.communicator import COMPARED
from bagua.job import job_thread, long_waits
from bagua.job.torch_internals import Store, default_store
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm
from bagua.torch_api.checkpoint import save_checkpoint
from bagua.torch_api.communication import new_group

DIFFERENT = "the ranks run different code"
GRADIENTS = "the gradients of a backward pass"
RANKS = [0, 1, 2]


class TakenLines(Lines):
    """Of the log of this rank."""

    def has(self, words: str) -> bool:
        return any(words in text for text in self.lines)

    def take(self, words: str) -> list[str]:
        """The first line of each that has the words, since the last call."""
        texts, self.lines = self.lines, []
        return [text.splitlines()[0] for text in texts if words in text]


def client() -> Store:
    """Of its own, while this rank's main thread may wait in the other one."""
    return job_thread.current_job_thread()._store.get()


def wait_for_inquiries() -> None:
    """Enough to prove twice what there is to prove."""

    def inquiries() -> int:
        return int(client().compare_set(long_waits.INQUIRY, "", long_waits.NO_INQUIRY).partition(b":")[0])

    before = inquiries()
    wait_until(lambda: inquiries() >= before + 4, "inquiries")


class Meanwhile:
    """A thread that does something while the main thread of this rank waits."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._error: BaseException | None = None
        self._function = function
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._function()
        except BaseException as error:
            self._error = error

    def join(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error


class Rank:
    """Of a job of three, with one model, and groups of Bagua by name."""

    def __init__(self, folder: Path) -> None:
        self.rank, self._device = begin()
        self.folder = folder
        self._lines = TakenLines(logging.WARNING)
        self._told = 0
        self.groups = {name: new_group(ranks) for name, ranks in GROUPS.items()}
        self.net: Any = mlp(self.rank, self._device)
        self.net.with_bagua([momentum(self.net)], GradientAllReduceAlgorithm(), process_group=self.groups["model"])
        self.weighted: Any = mlp(self.rank, self._device)
        optimizer = momentum(self.weighted)
        bagua.with_bagua(self.weighted, [optimizer], process_group=self.groups["weighted"], batch_weights=True)
        made = dist.new_group([0, 2])
        self.torch_group = made if isinstance(made, dist.ProcessGroup) else None

    def barrier(self, group: str) -> None:
        bagua.barrier(self.groups[group].get_global_communicator())

    def backward(self) -> None:
        self.net(torch.ones(3, 2, device=self._device)).sum().backward()

    def backward_with_weight(self) -> None:
        """Rank 0 tells two."""
        self.weighted.set_batch_weight(3)
        output = self.weighted(torch.ones(3, 2, device=self._device))
        if self.rank == 0:
            self.weighted.set_batch_weight(2)
        output.sum().backward()

    def once_all_are_told(self, function: Callable[[], None]) -> Meanwhile:
        self._told += 1
        keys = [f"told {self._told} {rank}" for rank in RANKS]

        def wait_and_do() -> None:
            wait_until(lambda: self._lines.has(DIFFERENT), "the log line")
            client().set(keys[self.rank], "")
            wait_until(lambda: client().check(keys), "the other ranks")
            function()

        return Meanwhile(wait_and_do)

    def differ(self, one: str, others: str, *partners: Callable[[], None], main: Callable[[], None]) -> None:
        """All ranks are told this once, by then. One that came later, on a busy machine, is not in the others' line."""
        partner = self.once_all_are_told(partners[self.rank])
        main()
        partner.join()
        (line,) = self._lines.take(DIFFERENT)
        sides = f"Rank 0 waits in {one}, (rank 1|rank 2|ranks 1 and 2) in {others}"
        found = re.fullmatch(f"{sides}: {DIFFERENT}\\.", line)
        assert found, line
        assert self.rank == 0 or str(self.rank) in found[1]

    def is_told_nothing(self) -> None:
        bagua.barrier()
        assert self._lines.take(DIFFERENT) == []


GROUPS = {"model": RANKS, "weighted": RANKS, "A": RANKS, "B": RANKS, "C": RANKS, "0 2": [0, 2], "1 2": [1, 2]}


@on_ranks(3, timeout=240, joined=False)
def test_ranks_that_run_different_code_are_told_and_others_are_not(tmp_path: Path) -> None:
    long_waits.ASK_S, long_waits.REPEAT_S, long_waits.ANSWER_S, long_waits.NAME_S = 0.6, 0.4, 0.3, 0.6
    job_thread.SLOW_TICK_S = job_thread.TICK_S = 0.1
    it = Rank(tmp_path)

    # The wait goes on, and a late partner completes it: another thread, which does what the other ranks do.
    for iteration in (1, 2):  # with the making of a group, and without
        it.backward()  # by the thread that trains

        def save_on_rank_0_first(iteration: int = iteration) -> None:
            if it.rank:
                it.backward()
            save_checkpoint(iteration, it.folder, it.net)

        it.differ("save_checkpoint", GRADIENTS, it.backward, nothing, nothing, main=save_on_rank_0_first)

    def one_after_the_other() -> None:
        for group in "AB" if it.rank == 0 else "BA":
            if not (it.rank == 0 and group == "B"):
                it.barrier(group)

    barrier = r"barrier \(group \w+, ranks 0 to 2\)"
    it.differ(barrier, barrier, lambda: it.barrier("B"), nothing, nothing, main=one_after_the_other)

    # Late in the same collective, in no other one.
    if it.rank == 2:
        wait_for_inquiries()
    it.backward()
    it.is_told_nothing()

    # Stopped, in the same collective.
    if it.rank == 2:
        default_store().set("pid", str(os.getpid()))
        default_store().wait(["goes on"])
    stops = Meanwhile(stop_and_go_on) if it.rank == 0 else None
    it.barrier("A")
    if stops is not None:
        stops.join()
    it.is_told_nothing()

    # Two wait in different groups for a third one, which is in a collective of torch's.
    partner = Meanwhile(lambda: all_reduce(it)) if it.rank == 0 else None
    if it.rank == 2:
        all_reduce(it)
    for rank in range(2):
        if it.rank in (rank, 2):
            it.barrier(f"{rank} 2")
    if partner is not None:
        partner.join()
    it.is_told_nothing()

    for _ in range(COMPARED):  # after which they are not compared before they begin
        it.barrier("C")

    # What cannot be completed any more: gloo does not tell the operations of one group apart.
    def ends(call: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            with pytest.raises(RuntimeError):
                call()

        return run

    main = ends(lambda: it.barrier("C") if it.rank else gather(it))
    it.differ("all_gather of 1 float32", "barrier", *[it.groups["C"].abort] * 3, main=main)
    all_are_through("C", it.rank)

    main = ends(it.backward_with_weight)
    abort = it.groups["weighted"].abort
    it.differ("telling the weights of batches", GRADIENTS, abort, abort, abort, main=main)
    all_are_through("weights", it.rank)

    main = ends(it.backward if it.rank else lambda: it.barrier("model"))
    it.differ("barrier", GRADIENTS, *[it.groups["model"].abort] * 3, main=main)


def all_are_through(what: str, rank: int) -> None:
    """What others do meanwhile would be different, too."""
    default_store().set(f"through with {what} {rank}", "")
    default_store().wait([f"through with {what} {one}" for one in RANKS])


def nothing() -> None:
    pass


def stop_and_go_on() -> None:
    """Rank 2."""
    wait_until(lambda: client().check(["pid"]), "rank 2")
    pid = int(client().get("pid"))
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_for_inquiries()
    finally:
        os.kill(pid, signal.SIGCONT)
    client().set("goes on", "")


def all_reduce(it: Rank) -> None:
    """By torch, on ranks 0 and 2, once the others have asked."""
    if it.rank == 0:
        wait_for_inquiries()
    dist.all_reduce(torch.ones(1), group=it.torch_group)


def gather(it: Rank) -> None:
    bagua.allgather(torch.ones(1), torch.ones(3), it.groups["C"].get_global_communicator())
