"""ByteGrad: every rank steps with the mean (or sum) of all ranks' gradients, compressed: as a byte per element,
or by another codec.

With C the compression of the codec (docs/design/compression.md), D its inverse, and a bucket cut into a chunk per rank:

    y[r] = C(1/n * sum over ranks i of D(C(g_i[r])))       the chunk of rank r, sent to all      (average=True)
    g[r] = D(y[r])                                         on every rank the same bits

With hierarchical=True there is a chunk per node: the ranks of a node add up their gradients as they are, and only the
leaders of nodes exchange compressed ones. Gradients of float32, float16 and bfloat16 are compressed; those of other
dtypes (float64, complex) are communicated as they are, as gradient_allreduce does.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from bagua.codecs import Codec, get_codec
from bagua.collectives.process_group import BaguaProcessGroup
from bagua.comm_ops.compressed import DEFAULT_CODEC, compressed_alignment, idle_hierarchy
from bagua.comm_ops.public_bucket import BaguaBucket
from bagua.engine.algorithm_facade import AlgorithmFacade
from bagua.torch_api.algorithms.base import Algorithm, AlgorithmImpl, idle_codec


class ByteGradAlgorithmImpl(AlgorithmImpl):
    """See ByteGradAlgorithm."""

    def __init__(
        self,
        process_group: BaguaProcessGroup,
        hierarchical: bool = True,
        average: bool = True,
        codec: str | Codec = DEFAULT_CODEC,
    ) -> None:
        super().__init__(process_group)
        self.codec = get_codec(codec)
        self.hierarchical = hierarchical
        self.average = average

    def tensors_to_buckets(self, tensors: Sequence[Sequence[Tensor]], do_flatten: bool) -> list[BaguaBucket]:
        alignment = compressed_alignment(self.process_group, self.hierarchical, self.codec)
        return [BaguaBucket(group, str(number), do_flatten, alignment) for number, group in enumerate(tensors)]

    def init_operations(self, bagua_ddp: AlgorithmFacade, bucket: BaguaBucket) -> None:
        bucket.clear_ops()
        bucket.append_centralized_synchronous_op(
            hierarchical=self.hierarchical,
            average=self.average,
            compression=self.codec if bucket.dtype in self.codec.dtypes else None,
            group=self.process_group,
        )

    def options_without_effect(self, bagua_ddp: AlgorithmFacade) -> list[str]:
        found = idle_codec("codec", self.codec, bagua_ddp)
        return found or idle_hierarchy(self.process_group, self.hierarchical, "gradients")


class ByteGradAlgorithm(Algorithm):
    """
    Args:
        hierarchical: reduce within each node first, without compression, so that only one rank per node sends to other
            nodes.
        average: the mean of the gradients; otherwise their sum.
        codec: what is sent: a name of `bagua.codecs.codec_names()`, or a Codec. The same on all ranks.

    Raises:
        ValueError: an unknown codec; the error lists the known ones.
    """

    is_interchangeable = True
    follows_regroup = True
    weighs_batches = True

    def __init__(self, hierarchical: bool = True, average: bool = True, codec: str | Codec = DEFAULT_CODEC) -> None:
        self._codec = get_codec(codec)
        self.codec = self._codec.name
        self.hierarchical = hierarchical
        self.average = average

    def reify(self, process_group: BaguaProcessGroup) -> ByteGradAlgorithmImpl:
        return ByteGradAlgorithmImpl(process_group, self.hierarchical, self.average, self._codec)
