"""Groups of the same ranks for one purpose each, made once: whatever serves the purpose uses one order in it."""

from __future__ import annotations

import weakref

from bagua.collectives.process_group import BaguaProcessGroup, duplicate_group

_made: weakref.WeakKeyDictionary[BaguaProcessGroup, dict[str, BaguaProcessGroup]] = weakref.WeakKeyDictionary()


def group_for(purpose: str, group: BaguaProcessGroup, backend: str | None = None) -> BaguaProcessGroup:
    """The duplicate of a group that serves this purpose; for a group of one rank, itself. Collective, the first time.

    Args:
        purpose: a name that is always used with the same backend.
        backend: as in `duplicate_group`, whose errors these are, too.

    Raises:
        NotImplementedError: the group follows when ranks are lost, and its duplicate would not.
    """
    if group.follows:
        raise NotImplementedError(
            f"regroup: {purpose} cannot be exchanged between {group.size} ranks under regroup: that needs a group of"
            " its own, which would not follow when a rank is lost.\n"
            "Leave out the layer or sampler that exchanges them, or leave regroup out of init_process_group()."
        )
    if group.size == 1:
        return group
    by_purpose = _made.setdefault(group, {})
    own = by_purpose.get(purpose)
    if own is None or not own.is_alive:  # torch was shut down since
        own = by_purpose[purpose] = duplicate_group(group, backend)
    return own
