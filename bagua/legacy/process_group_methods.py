"""What Bagua adds to torch.distributed.ProcessGroup: a torch group gives its Bagua group and communicators.

The Bagua group is made once for a torch group and goes with it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from bagua.collectives.communicator import BaguaCommunicator
from bagua.collectives.process_group import BaguaProcessGroup, from_torch_group


class ProcessGroupMethods:
    """Never constructed: these are members of torch.distributed.ProcessGroup."""

    def bagua_patch(self: Any, stream: torch.cuda.Stream | None = None) -> dist.ProcessGroup:
        """
        Makes the Bagua group of this torch group, unless it has one.

        Args:
            stream: for work beside the caller's; None: a new one of high priority when it is needed.

        Returns:
            This same torch group.
        """
        from_torch_group(self, stream)
        group: dist.ProcessGroup = self
        return group

    @property
    def bagua_pg(self: Any) -> BaguaProcessGroup:
        """The Bagua group on top of this torch group."""
        return from_torch_group(self)

    def bagua_get_global_communicator(self: Any) -> BaguaCommunicator:
        """Of all members."""
        return from_torch_group(self).get_global_communicator()

    def bagua_get_inter_node_communicator(self: Any) -> BaguaCommunicator:
        """Of the first member of every node; NON_COMM_MEMBER for the others."""
        return from_torch_group(self).get_inter_node_communicator()

    def bagua_get_intra_node_communicator(self: Any) -> BaguaCommunicator:
        """Of the members on this node."""
        return from_torch_group(self).get_intra_node_communicator()
