"""Lets the ranks of a job wait for each other before they make the default group, and tells for whom they wait.

Called by the thread that makes the group: there is no job thread before it (bagua.job.job_thread).

[Note: keys] In the store of this start:
    bagua/joined/<rank>        the WORLD_SIZE of a rank that has come
    bagua/joined/of_<n>/<rank> how often a rank has come with the WORLD_SIZE n
    bagua/joined/of_<n>/count  how many ranks have come with it
    bagua/joined/of_<n>/all    there once all of them have come, so that each rank asks for one key
In a store that has served a former start, all of them are there, and nobody waits here.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import threading
import time
from collections.abc import Iterator

import torch.distributed as dist

from bagua import launch_environment
from bagua.job.torch_internals import Store
from bagua.rank_list import rank_list

# Longer than most programs import on one rank than on another. Who is later is named once, and waited for.
TELL_S = 30.0
_PREFIX = "bagua/joined"
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.002, 1.0
_PAUSE_SHARE = 0.1  # of the time that was waited
_ADVICE = "Check that a process of each rank was started, its log, and that all have the same WORLD_SIZE."

_logger = logging.getLogger("bagua")


def wait_for_all(store: Store, rank: int, world_size: int, timeout: datetime.timedelta) -> None:
    """
    Waits until all ranks have called this. After TELL_S, the first of those that wait tells who is missing.

    Raises:
        torch.distributed.DistStoreError: they have not within the timeout; a RuntimeError.
    """
    same = f"{_PREFIX}/of_{world_size}"
    store.set(f"{_PREFIX}/{rank}", str(world_size))
    if store.add(f"{same}/{rank}", 1) == 1 and store.add(f"{same}/count", 1) == world_size:
        store.set(f"{same}/all", "")
    begin = time.monotonic()
    limit = timeout.total_seconds()
    is_told = False
    while not store.check([f"{same}/all"]):
        waited = time.monotonic() - begin
        if waited >= limit:
            raise dist.DistStoreError(
                f"Not all ranks have joined within the timeout of {limit:g} s: {_missing(store, world_size)}.\n"
                f"Rank {rank} has waited for them in init_process_group().\n{_ADVICE}"
            )
        if not is_told and waited >= TELL_S:
            is_told = True
            if _is_first(store, rank):
                _logger.warning(
                    f"Rank {rank} has waited {waited:.0f} s in init_process_group() for"
                    f" {_missing(store, world_size)}. It goes on waiting, for at most {limit:g} s. {_ADVICE}"
                )
        time.sleep(min(max(_FIRST_PAUSE_S, _PAUSE_SHARE * waited), _LAST_PAUSE_S, limit - waited))


def _is_first(store: Store, rank: int) -> bool:
    """Of those that have come. It alone tells: in a large job, all others would say the same."""
    return not any(store.check([f"{_PREFIX}/{other}"]) for other in range(rank))


def _missing(store: Store, world_size: int) -> str:
    """ "ranks 2 and 3 of 4, rank 1, which has WORLD_SIZE=2"."""
    absent: list[int] = []
    others: list[str] = []
    for rank in range(world_size):
        key = f"{_PREFIX}/{rank}"
        if not store.check([key]):
            absent.append(rank)
        elif (size := store.get(key).decode()) != str(world_size):
            others.append(f"rank {rank}, which has WORLD_SIZE={size} instead of {world_size}")
    return "; ".join([*([f"{rank_list(absent)} of {world_size}"] if absent else []), *others]) or "the last answer"


@contextlib.contextmanager
def told_of_rank_0(address: str, port: int) -> Iterator[None]:
    """While this process connects to the store that rank 0 serves, or torchrun on its host. After TELL_S, one process
    of each node tells that it waits for that. A thread, for torch waits in one call."""
    if launch_environment.local_rank() != 0:
        yield
        return
    timer = threading.Timer(
        TELL_S,
        lambda: _logger.warning(
            f"Rank {launch_environment.rank()} has waited {TELL_S:g} s in init_process_group() for rank 0, which is to"
            f" listen at MASTER_ADDR:MASTER_PORT={address}:{port}. It goes on waiting. Check that rank 0 was started,"
            " its log, and that this host reaches that address."
        ),
    )
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
