"""BaguaBucket: a bucket with a method for each kind of communication, as algorithms written for Bagua use it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from bagua.codecs import Codec
from bagua.collectives.communicator import BaguaCommunicator
from bagua.collectives.process_group import BaguaProcessGroup
from bagua.comm_ops.all_reduce import goes_directly
from bagua.comm_ops.async_average import AsyncModelAverage
from bagua.comm_ops.centralized import AllReduce, DirectAllReduce, HierarchicalAllReduce, ScatterGatherAllReduce
from bagua.comm_ops.compressed import CompressedAllReduce
from bagua.comm_ops.decentralized import PeerWeightAverage
from bagua.comm_ops.low_precision_decentralized import LowPrecisionRing
from bagua.engine.bucket import Bucket


class BaguaBucket(Bucket):
    """Tensors that are communicated together (see bagua.engine.bucket.Bucket for arguments and errors)."""

    def append_centralized_synchronous_op(
        self,
        hierarchical: bool = False,
        average: bool = True,
        scattergather: bool = False,
        compression: str | Codec | None = None,
        group: BaguaProcessGroup | None = None,
    ) -> BaguaBucket:
        """Every rank ends with the mean (`average`) or the sum over all ranks. Returns the bucket.

        Args:
            hierarchical: reduce within each node first, so that only one rank per node talks to other nodes. With
                one node: an all-reduce, whose result a compression rounds.
            scattergather: all-to-all, local sum, all-gather; needs a bucket whose alignment is the number of ranks.
                With a compression that is the way in any case.
            compression: a codec (bagua.codecs), by its name: "int8", "int4", ... or 0.9's "MinMaxUInt8", which is int8;
                None: nothing is compressed. It needs a bucket of float32, float16 or bfloat16 whose alignment is the
                number of ranks or, with `hierarchical`, of nodes.
            group: default: Bagua's default group.

        Raises:
            TypeError: a bucket of a dtype that cannot be compressed.
            ValueError: an unknown compression, a bucket of a length that it cannot share out, or scattergather together
                with hierarchical and without compression.
        """
        if compression is not None:
            chosen = _group_or_default(group)
            compressed = CompressedAllReduce(chosen, average, hierarchical, self.everybody(chosen), compression)
            compressed.check(self.flattened_tensor(), f"bucket {self.name!r}")
            self.append_op(compressed)
            return self
        if scattergather and hierarchical:
            raise ValueError("scattergather and hierarchical exclude each other without compression; choose one")
        chosen = _group_or_default(group)
        if scattergather:
            self.append_op(ScatterGatherAllReduce(self.everybody(chosen), average))
        elif hierarchical and not chosen.topology.is_one_node:
            self.append_op(HierarchicalAllReduce(chosen, average))
        elif goes_directly(self.flattened_tensor(), chosen.size):
            self.append_op(DirectAllReduce(self.everybody(chosen), average))
        else:
            # On CPU the communicator of the large buckets, too: the thread that sends those may run this as well.
            self.append_op(AllReduce(self.everybody(chosen), average, self.device, self.dtype))
        return self

    def everybody(self, group: BaguaProcessGroup) -> BaguaCommunicator:
        """For an operation that the communication thread may run, while others use the group. With CUDA there is no
        such thread: the order in which kernels are queued is the same on all ranks."""
        on_thread = self.device.type == "cpu" and group.size > 1
        return group.get_background_communicator() if on_thread else group.get_global_communicator()

    def append_decentralized_synchronous_op(
        self,
        peer_weight: Tensor,
        hierarchical: bool = True,
        peer_selection_mode: str = "all",
        group: BaguaProcessGroup | None = None,
    ) -> PeerWeightAverage:
        """`peer_weight` becomes the mean of the bucket over all ranks or over pairs of them. Returns the operation,
        whose `copy_back_peer_weight(bucket.backend_bucket)` puts it into the bucket when the communication is done.

        Args:
            peer_weight: 1-D, of the length, dtype and device of `flattened_tensor()`; other memory, unless the bucket
                does not flatten.
            hierarchical: the mean within each node first, so that only one rank per node talks to other nodes.
            peer_selection_mode: "all", or "shift_one": with one other rank (node) at a time, of an even number.
            group: default: Bagua's default group. No other communication of it should be under way meanwhile.

        Raises:
            ValueError: a `peer_weight` that does not fit, an unknown mode, or an odd number with "shift_one".
        """
        self._check_like_bucket(peer_weight=peer_weight)
        op = PeerWeightAverage(_group_or_default(group), peer_weight, hierarchical, peer_selection_mode)
        self.append_op(op)
        return op

    def append_low_precision_decentralized_synchronous_op(
        self,
        weight: Tensor,
        left_peer_weight: Tensor,
        right_peer_weight: Tensor,
        hierarchical: bool = True,
        compression: str | Codec = "MinMaxUInt8",
        group: BaguaProcessGroup | None = None,
    ) -> LowPrecisionRing:
        """The bucket is mixed with those of both neighbors in the ring of ranks, from compressed differences
        (bagua.comm_ops.low_precision_decentralized). Returns the operation.

        Args:
            weight: this rank's weights after the last exchange; 1-D, with the length, dtype and device of
                `flattened_tensor()`, in other memory.
            left_peer_weight: those of the left neighbor, likewise.
            right_peer_weight: those of the right neighbor, likewise.
            hierarchical: the mean within each node first; then the nodes form the ring.
            compression: a codec (bagua.codecs), by its name; "MinMaxUInt8" is int8.
            group: default: Bagua's default group.

        Raises:
            ValueError: an unknown compression, or a tensor that does not fit.
        """
        self._check_like_bucket(weight=weight, left_peer_weight=left_peer_weight, right_peer_weight=right_peer_weight)
        replicas = (weight, left_peer_weight, right_peer_weight)
        op = LowPrecisionRing(_group_or_default(group), *replicas, hierarchical, codec=compression)
        self.append_op(op)
        return op

    def append_asynchronous_model_average_op(
        self, peer_selection_mode: str = "all", group: BaguaProcessGroup | None = None
    ) -> AsyncModelAverage:
        """The elements x, which may be changed while the ranks communicate, move to their mean: x += mean(copy) - copy.
        Returns the operation, with lock_weight, unlock_weight, abort, reset and get_status.

        Args:
            peer_selection_mode: "all".
            group: default: Bagua's default group. No other communication of it may be under way meanwhile.

        Raises:
            ValueError: an unknown mode.
        """
        if peer_selection_mode != "all":
            raise ValueError(f"peer_selection_mode={peer_selection_mode!r} is unknown; there is 'all'")
        chosen = _group_or_default(group)
        op = AsyncModelAverage(chosen, chosen.communicator_for(f"bucket {self.name!r}", self.tensors))
        self.append_op(op)
        return op

    def _check_like_bucket(self, **tensors: Tensor) -> None:
        flat = self.flattened_tensor()
        expected = (flat.dtype, tuple(flat.shape), flat.device)
        for name, tensor in tensors.items():
            found = (tensor.dtype, tuple(tensor.shape), tensor.device)
            if found != expected or not tensor.is_contiguous():
                raise ValueError(
                    f"bucket {self.name!r}: {name} is {found[0]} {list(found[1])} on {found[2]}, must be contiguous"
                    f" {expected[0]} {list(expected[1])} on {expected[2]}; make it with flattened_tensor().clone()"
                )


class WeightBucket(BaguaBucket):
    """Weights, which keep their memory, because others may share it: the bucket has copies.

    Args:
        tensors: as of Bucket.
        name: as of Bucket.
        do_flatten: as of `with_bagua`. If set, `fuse_optimizer` leaves the weights alone, as if they lay in the bucket:
            what Bagua 0.9 does not fuse is not fused.
        alignment: as of Bucket.
    """

    def __init__(self, tensors: Sequence[Tensor], name: str, do_flatten: bool, alignment: int = 1) -> None:
        super().__init__(tensors, name, flatten=False, alignment=alignment)
        if do_flatten:
            for record, view in zip(self.records, self.views, strict=True):
                record.view = view


def _group_or_default(group: BaguaProcessGroup | None) -> BaguaProcessGroup:
    from bagua.collectives.process_group import to_bagua_process_group

    return to_bagua_process_group(group)
