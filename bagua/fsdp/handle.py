"""What compress_communication returns: the statistics, the state and the end of it. Any thread, between steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from bagua.codecs import Codec, dtype_names
from bagua.fsdp.all_gather import CompressedAllGather, WeightReference
from bagua.fsdp.model import ShardedModel
from bagua.fsdp.nodes import Traffic
from bagua.fsdp.reduce_scatter import CompressedReduceScatter
from bagua.fsdp.replica_all_reduce import ReplicaAllReduce, ReplicaGroup, ReplicaHook
from bagua.fsdp.residual import Residual
from bagua.fsdp.torch_internals import ShardedModule


def why_incompressible(one: ShardedModule, gradients: Codec | None) -> str | None:
    """Of its gradients: in which dtype they are reduced, if the codec has not that, and the remedy."""
    unknown = one.reduced_dtypes - set(gradients.dtypes) if gradients is not None else None
    if gradients is None or not unknown:
        return None
    # torch casts no complex gradients to a reduce_dtype that is real.
    remedy = (
        "Pass gradients=None, and compress weights alone"
        if any(dtype.is_complex for dtype in unknown)
        else "Set reduce_dtype in its MixedPrecisionPolicy"
    )
    return (
        f"{one.subject} reduces gradients in {dtype_names(unknown)}, which {gradients.name} cannot compress; it can"
        f" compress {dtype_names(gradients.dtypes)}.\n{remedy}."
    )


@dataclass
class CompressedModule:
    """One sharded module, the codec of its gradients, what was put into it, None where nothing was, and by attributes
    of `sharded`, what stands there now and what stood there before. `check` runs at the beginning of each forward
    pass."""

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


_VERSION = 1
_KEYS = {"version", "settings", "forward_passes", "residuals", "scales", "references"}


class CompressionHandle:
    """What `compress_communication` has set up on a model. Compression goes on if it is dropped."""

    def __init__(
        self,
        modules: Sequence[CompressedModule],
        settings: Mapping[str, Any],
        traffic: Mapping[str, Traffic],
        model: ShardedModel,
    ) -> None:
        self._modules = list(modules)
        self._settings = dict(settings)
        self._traffic = traffic
        self._model = model
        model.follow_passes(check=self._check)

    @property
    def statistics(self) -> dict[str, dict[str, int]]:
        """`{"gradients": {"sent": bytes, "saved": bytes}, "weights": ...}`: what this rank has sent to other nodes
        through compressed collectives, and what torch's own would have sent on top of that. Of what a ring of all ranks
        carries out of a node, each of the node's ranks counts an equal part. In a job of one node, what goes to other
        ranks is counted. `saved` is negative if compression cost more than it saved: a module of a few parameters sends
        its scales and padding, too. Weights that had to be exact count as sent. What is not compressed at all is not
        counted."""
        return {purpose: traffic.as_dict() for purpose, traffic in self._traffic.items()}

    def remove(self) -> None:
        """Puts back the collectives that were there before. From the next step on, gradients and weights are bitwise
        those of a model that was never compressed. Call it on all ranks, between steps."""
        for one in self._modules:
            one.remove()
        self._model.remove()

    def _check(self) -> None:
        for one in self._modules:
            one.check()

    def state_dict(self) -> dict[str, Any]:
        """What this rank's compression remembers, to be saved with the model: one file per rank.

        Returns:
            `version`, `settings` (with the rank and the number of ranks), `forward_passes`; `residuals`: by module,
            uint8 [ranks, bytes], or with several ranks on each of several nodes [nodes, bytes], with `error_feedback`;
            `scales`: of the loss, that these are in, with `grad_scaler`; `references`: by module, this rank's part of
            the weights that all ranks have, [elements], with `weight_differences`. Tensors are copies on the CPU.
        """
        residuals = {name: one.stored for name, one in self._residuals().items()}
        scales = {name: one.scale.value for name, one in self._residuals().items()}
        references = {name: one.own_part() for name, one in self._references().items()}
        return {
            "version": _VERSION,
            "settings": dict(self._settings),
            "forward_passes": self._model.passes,
            "residuals": _copies(residuals),
            "scales": _copies(scales),
            "references": _copies(references),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as the same rank did when it gave `state`. Call it before the first step.

        Raises:
            ValueError: `state` is not one of this class, or of other settings, modules, ranks or number of ranks;
                nothing has changed then.
        """
        if {*state, "scales"} != _KEYS or state["version"] != _VERSION:
            raise ValueError(
                f"A state of compress_communication has {sorted(_KEYS)} and version {_VERSION}; this one has "
                f"{sorted(state)} and version {state.get('version')}.\nGive what state_dict() returned."
            )
        other = {
            name: (state["settings"].get(name), value)
            for name, value in self._settings.items()
            if state["settings"].get(name) != value
        }
        if other:
            told = ", ".join(f"{name} was {before!r} and is {now!r}" for name, (before, now) in other.items())
            raise ValueError(
                f"The state of compress_communication does not fit: {told}.\nIt belongs to one rank of one number of "
                "ranks and cannot be divided among others. Continue without it: weights are sent in full once, and "
                "what compression took from the last gradients is lost."
            )
        residuals, references = self._residuals(), self._references()
        unknown = sorted((set(state["residuals"]) - set(residuals)) | (set(state["references"]) - set(references)))
        if unknown:
            raise ValueError(
                f"The state of compress_communication is of modules that this model does not have: {unknown}.\n"
                "Shard the same modules as when it was saved, or continue without it."
            )
        for name, residual in residuals.items():
            residual.load(state["residuals"].get(name), state.get("scales", {}).get(name))
        for name, reference in references.items():
            reference.load_own_part(state["references"].get(name))
        self._model.resume(state["forward_passes"])

    def _residuals(self) -> dict[str, Residual]:
        """By module; where both of its collectives have one, that of the replicas ends in "@replicas"."""
        found = {}
        for one in self._modules:
            for owner, suffix in ((one.reduce_scatter, ""), (one.all_reduce, "@replicas")):
                if owner is not None and owner.residual is not None:
                    found[one.sharded.name + suffix] = owner.residual
        return found

    def _references(self) -> dict[str, WeightReference]:
        return {
            one.sharded.name: one.all_gather.reference
            for one in self._modules
            if one.all_gather is not None and one.all_gather.reference is not None
        }


def _copies(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: one.to("cpu", copy=True) for name, one in tensors.items() if one is not None}
