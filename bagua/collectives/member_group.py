"""Creates torch groups by their members alone: nobody else has to call. Called by one thread of each member at a time.

torch can do that (`use_local_synchronization`), but it names the group after the members and the number of groups that
the process has, and processes with different numbers, which is what groups of some ranks lead to, would wait for each
other under different names. So the members first agree, through the store, on a number, the largest of theirs. It is
above those of their earlier groups too, so that no name comes twice.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Sequence

import torch.distributed as dist

from bagua.job import torch_internals
from bagua.job.deadlock import EVERYWHERE, OperationOrder
from bagua.job.failure_report import explain_failure
from bagua.job.job_thread import current_job_thread, waiting_for
from bagua.job.waiting import Members
from bagua.rank_list import rank_list

# Never reset, also not when torch is shut down and set up again: a name that was used once leaves addresses in the
# store that would mislead the next group of that name.
_attempts: dict[tuple[int, ...], OperationOrder] = {}
_used_numbers = 0


def create_member_group(whole: Members, ranks: Sequence[int], backend: str | None = None) -> dist.ProcessGroup:
    """
    Args:
        whole: a group that has all of these ranks, for its timeout and for messages.
        ranks: global, ascending, this process among them. Every one of them calls this, in the same order for the
            same ranks.
        backend: as torch.distributed.new_group has it; None: that of the default group.

    Raises:
        CollectiveError: a member did not call within the timeout; it says what others do.
    """
    global _used_numbers
    members = tuple(ranks)
    what = f"making a group of {rank_list(members)}"
    attempts = _attempts.get(members)
    if attempts is None:
        names = "_".join(map(str, members))
        attempts = _attempts[members] = OperationOrder(f"{EVERYWHERE}{len(members)}/{zlib.crc32(names.encode())}")
    current_job_thread().count(attempts)
    attempt = attempts.begin(what)
    store = torch_internals.PrefixStore(
        f"bagua/member_group/{'_'.join(map(str, members))}/{attempt}", torch_internals.default_store()
    )
    store.set(str(dist.get_rank()), str(max(torch_internals.registered_groups(), _used_numbers)))
    keys = [str(rank) for rank in members]
    # Not as a wait that can be ended: the one who makes a communicator holds the lock that `abort` needs.
    waiting = waiting_for(members, what, whole, attempts, attempt, is_ended_by_abort=False)
    with waiting or contextlib.nullcontext():
        try:
            store.wait(keys, whole.timeout)
        except dist.DistStoreError as error:
            raise explain_failure(error, whole, what, members) from error
        number = max(map(int, store.multi_get(keys)))
        with torch_internals.no_bound_device(), torch_internals.registered_groups_raised_to(number):
            group = dist.new_group(
                list(members), timeout=whole.timeout, backend=backend, use_local_synchronization=True
            )
    _used_numbers = number + 1
    attempts.done = attempt
    assert isinstance(group, dist.ProcessGroup), "this process is a member"
    return group
