"""Groups of parameters that one optimizer updates, with a count of steps for each group.

[Note: safe points]
Parameters change, and are copied, right after a step of the optimizer that owns them: a graph of autograd that uses
them is of no use any more then. Those that no listed optimizer owns have their safe point at the beginning of a forward
pass, if somebody has changed them since the one before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from bagua.engine.bucket import Bucket


class UpdateGroup:
    """The parameters of one optimizer, or those that none of the listed ones has. They share their safe points."""

    def __init__(self) -> None:
        self.buckets: list[Bucket] = []
        self.steps = 0

    @property
    def parameters(self) -> list[list[Tensor]]:
        """Of each bucket."""
        return [bucket.tensors for bucket in self.buckets]

    def versions(self) -> int:
        """Grows whenever somebody changes a parameter in place."""
        return sum(tensor._version for bucket in self.buckets for tensor in bucket.tensors)


class UpdateGroups:
    """Of one module.

    Attributes:
        owners: by the position of the optimizer in the list; last that of what none of them steps.
        rest: the position of the latter, whether there is one or not.
    """

    def __init__(self) -> None:
        self.owners: dict[int, UpdateGroup] = {}
        self.rest = 0
        self._positions: Mapping[int, int] = {}
        self._versions = 0

    def set_owners(self, positions: Mapping[int, int], optimizers: int) -> None:
        """From now on `owner_of` tells who of the optimizers steps a parameter.

        Args:
            positions: by the id of a parameter.
        """
        self._positions, self.rest = positions, optimizers

    def owner_of(self, parameter: Tensor) -> int:
        """The position of the optimizer that steps it; behind all of them if none does."""
        return self._positions.get(id(parameter), self.rest)

    def divide(self, buckets: Sequence[Bucket]) -> None:
        """Each of the buckets, which have one owner each, to its owner. Steps go on being counted."""
        owners: dict[int, UpdateGroup] = {}
        for bucket in buckets:
            owners.setdefault(self.owner_of(bucket.tensors[0]), UpdateGroup()).buckets.append(bucket)
        for position, owner in owners.items():
            owner.steps = self.owners[position].steps if position in self.owners else 0
        self.owners = owners
        self.look_at_rest()

    def look_at_rest(self) -> None:
        """`rest_has_changed` means since now."""
        rest = self.owners.get(self.rest)
        self._versions = rest.versions() if rest is not None else 0

    def rest_has_changed(self) -> bool:
        """Whether somebody has changed parameters that none of the optimizers steps."""
        rest = self.owners.get(self.rest)
        return rest is not None and rest.versions() != self._versions

    def state(self) -> tuple[list[list[list[Tensor]]], list[int]]:
        """Of each owner: the parameters of each bucket, and the steps."""
        return [owner.parameters for owner in self.owners.values()], [owner.steps for owner in self.owners.values()]
