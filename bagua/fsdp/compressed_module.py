"""What compress_communication puts into one sharded module, and takes back. The user's thread, between steps; `check`
runs at the beginning of each forward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bagua.codecs import Codec, dtype_names
from bagua.fsdp.all_gather import CompressedAllGather
from bagua.fsdp.reduce_scatter import CompressedReduceScatter
from bagua.fsdp.replica_all_reduce import ReplicaAllReduce, ReplicaGroup, ReplicaHook
from bagua.fsdp.torch_internals import ShardedModule


def why_incompressible(one: ShardedModule, gradients: Codec | None) -> str | None:
    """Of its gradients: in which dtype they are reduced, if the codec has not that, and the remedy."""
    unknown = one.reduced_dtypes - set(gradients.dtypes) if gradients is not None else None
    if gradients is None or not unknown:
        return None
    return (
        f"{one.subject} reduces gradients in {dtype_names(unknown)}, which {gradients.name} cannot compress; it can"
        f" {dtype_names(gradients.dtypes)}.\nSet reduce_dtype in its MixedPrecisionPolicy."
    )


@dataclass
class CompressedModule:
    """One sharded module, the codec of its gradients, what was put into it, None where nothing was, and by attributes
    of `sharded`, what stands there now and what stood there before."""

    sharded: ShardedModule
    gradients: Codec | None
    reduce_scatter: CompressedReduceScatter | None = None
    all_gather: CompressedAllGather | None = None
    all_reduce: ReplicaAllReduce | None = None
    now: dict[str, Any] = field(default_factory=dict)
    before: dict[str, Any] = field(default_factory=dict)
    renew_no_more: Callable[[], None] | None = None

    def install(self) -> None:
        put: dict[str, Any] = {"reduce_scatter": self.reduce_scatter, "all_gather": self.all_gather}
        if self.all_reduce is not None and self.sharded.replica_group is not None:
            put["replica_group"] = ReplicaGroup(self.all_reduce)
        elif self.all_reduce is not None:
            put["all_reduce_hook"] = ReplicaHook(self.all_reduce, lambda: self.sharded.divides_by_factor)
        for name, one in put.items():
            if one is not None:
                self.now[name], self.before[name] = one, getattr(self.sharded, name)
                setattr(self.sharded, name, one)
        if self.all_gather is not None:
            self.renew_no_more = self.sharded.surround("unshard", self.all_gather.renew)

    def check(self) -> None:
        """
        Raises:
            RuntimeError: the model or its settings were changed to what this compression cannot do.
        """
        if (problem := why_incompressible(self.sharded, self.gradients)) is not None:
            raise RuntimeError(f"{problem} Or convert the model back: it was converted after compress_communication.")
        hook = self.now.get("all_reduce_hook")
        if hook is not None and self.sharded.all_reduce_hook is not hook:
            raise RuntimeError(
                f"set_all_reduce_hook of module {self.sharded.name!r} was called after compress_communication, whose "
                "own hook averages gradients between replicas.\nLeave it out, or shard on a mesh with a dimension for "
                "replicas, which needs no hook."
            )
        differs = self.all_gather is not None and self.all_gather.reference is not None
        if differs and self.sharded.reshards_after_forward:
            raise RuntimeError(
                f"set_reshard_after_forward(True) of module {self.sharded.name!r} was called after "
                "compress_communication with weight_differences, for which weights must stay.\nLeave one of them out."
            )

    def remove(self) -> None:
        """What somebody has put there since then stays."""
        if self.renew_no_more is not None and self.all_gather is not None:
            self.renew_no_more()
            self.all_gather.end()
        for name, one in self.now.items():
            if getattr(self.sharded, name) is one:
                setattr(self.sharded, name, self.before[name])
