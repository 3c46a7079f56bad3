"""What compress_communication returns: the statistics, the state and the end of it. Any thread, between steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from bagua.fsdp.compressed_module import CompressedModule
from bagua.fsdp.model import ShardedModel
from bagua.fsdp.residual import Residual
from bagua.fsdp.traffic import Traffic
from bagua.fsdp.weight_reference import WeightReference

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
