"""Creates torch groups by their members alone: nobody else has to call. Called by one thread of each member at a time.

torch can do that (`use_local_synchronization`), but it names the group after the members and the number of groups that
the process has, and processes with different numbers, which is what groups of some ranks lead to, would wait for each
other under different names. So the members first agree, through the store, on a number, the largest of theirs. It is
above those of their earlier groups too, so that no name comes twice.
"""

from __future__ import annotations

import datetime
import itertools
from collections import defaultdict
from collections.abc import Sequence

import torch.distributed as dist

from bagua.job import torch_internals

# Never reset, also not when torch is shut down and set up again: a name that was used once leaves addresses in the
# store that would mislead the next group of that name.
_attempts: defaultdict[tuple[int, ...], itertools.count[int]] = defaultdict(itertools.count)
_used_numbers = 0


def create_member_group(
    ranks: Sequence[int], timeout: datetime.timedelta, backend: str | None = None
) -> dist.ProcessGroup:
    """
    Args:
        ranks: global, ascending, this process among them. Every one of them calls this, in the same order for the
            same ranks.
        backend: as torch.distributed.new_group has it; None: that of the default group.

    Raises:
        dist.DistError: a member did not call within the timeout.
    """
    global _used_numbers
    members = tuple(ranks)
    store = torch_internals.PrefixStore(
        f"bagua/member_group/{'_'.join(map(str, members))}/{next(_attempts[members])}", torch_internals.default_store()
    )
    me = dist.get_rank()
    store.set(str(me), str(max(torch_internals.registered_groups(), _used_numbers)))
    keys = [str(rank) for rank in members]
    store.wait(keys, timeout)
    number = max(map(int, store.multi_get(keys)))

    with torch_internals.no_bound_device(), torch_internals.registered_groups_raised_to(number):
        group = dist.new_group(list(members), timeout=timeout, backend=backend, use_local_synchronization=True)
    _used_numbers = number + 1
    assert isinstance(group, dist.ProcessGroup), "this process is a member"
    return group
