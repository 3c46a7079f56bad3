"""BaguaBucket: a bucket with a method for each kind of communication, as algorithms written for Bagua use it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bagua.comm_ops.centralized import AllReduce, HierarchicalAllReduce, ScatterGatherAllReduce
from bagua.engine.bucket import Bucket

if TYPE_CHECKING:
    from bagua.collectives.process_group import BaguaProcessGroup


class BaguaBucket(Bucket):
    """Tensors that are communicated together (see bagua.engine.bucket.Bucket for arguments and errors)."""

    def append_centralized_synchronous_op(
        self,
        hierarchical: bool = False,
        average: bool = True,
        scattergather: bool = False,
        compression: str | None = None,
        group: BaguaProcessGroup | None = None,
    ) -> BaguaBucket:
        """Every rank ends with the mean (`average`) or the sum over all ranks. Returns the bucket.

        Args:
            hierarchical: reduce within each node first, so that only one rank per node talks to other nodes.
            scattergather: all-to-all, local sum, all-gather; needs a bucket whose alignment is the number of ranks.
            compression: none is known here.
            group: default: Bagua's default group.

        Raises:
            ValueError: an unknown compression, or scattergather together with hierarchical.
        """
        if compression is not None:
            raise ValueError(f"compression={compression!r} is unknown; leave it out")
        if scattergather and hierarchical:
            raise ValueError("scattergather and hierarchical exclude each other without compression; choose one")
        chosen = _group_or_default(group)
        if scattergather:
            self.append_op(ScatterGatherAllReduce(chosen.get_global_communicator(), average))
        elif hierarchical:
            self.append_op(HierarchicalAllReduce(chosen, average))
        else:
            self.append_op(AllReduce(chosen.get_global_communicator(), average, self.device))
        return self


def _group_or_default(group: BaguaProcessGroup | None) -> BaguaProcessGroup:
    from bagua.collectives.process_group import to_bagua_process_group

    return to_bagua_process_group(group)
