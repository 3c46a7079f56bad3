"""What Bagua adds to torch.distributed.ProcessGroup: a torch group gives its Bagua group and communicators.

Importing bagua.torch_api adds it. The Bagua group is made once for a torch group and goes with it.
"""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as dist

from bagua.collectives.communicator import BaguaCommunicator
from bagua.collectives.process_group import BaguaProcessGroup, from_torch_group

_Group = TypeVar("_Group", bound=dist.ProcessGroup)


def bagua_patch(self: _Group, stream: torch.cuda.Stream | None = None) -> _Group:
    """
    Makes the Bagua group of this torch group, unless it has one.

    Args:
        stream: for work beside the caller's; None: a new one of high priority when it is needed.

    Returns:
        This same torch group.
    """
    from_torch_group(self, stream)
    return self


def bagua_pg(self: dist.ProcessGroup) -> BaguaProcessGroup:
    """The Bagua group on top of this torch group."""
    return from_torch_group(self)


def bagua_get_global_communicator(self: dist.ProcessGroup) -> BaguaCommunicator:
    """Of all members."""
    return from_torch_group(self).get_global_communicator()


def bagua_get_inter_node_communicator(self: dist.ProcessGroup) -> BaguaCommunicator:
    """Of the first member of every node; NON_COMM_MEMBER for the others."""
    return from_torch_group(self).get_inter_node_communicator()


def bagua_get_intra_node_communicator(self: dist.ProcessGroup) -> BaguaCommunicator:
    """Of the members on this node."""
    return from_torch_group(self).get_intra_node_communicator()


def patch_process_group() -> None:
    """Adds the above to torch.distributed.ProcessGroup. Again is harmless."""
    for method in (
        bagua_patch,
        bagua_get_global_communicator,
        bagua_get_inter_node_communicator,
        bagua_get_intra_node_communicator,
    ):
        setattr(dist.ProcessGroup, method.__name__, method)
    dist.ProcessGroup.bagua_pg = property(bagua_pg)  # type: ignore[attr-defined]
