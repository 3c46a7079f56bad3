"""The averaging of one module's parameters in the background, for the training thread: the life of the loop and of its
group of ranks."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bagua.collectives.process_group import BaguaProcessGroup
from bagua.comm_ops.async_average import BucketAverage
from bagua.comm_ops.averaging_group import AveragingGroup, create_averaging_group, destroyed_after
from bagua.comm_ops.averaging_loop import AveragingLoop
from bagua.comm_ops.averaging_memory import Part
from bagua.comm_ops.shared_elements import count_once
from bagua.engine.bucket import Bucket

# [Note: safe points] Parameters change, and are copied, right after a step of the optimizer that owns them: a graph of
# autograd that uses them is of no use any more then. Those that no listed optimizer owns have their safe point at the
# beginning of a forward pass, if somebody has changed them since the one before.


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


_logger = logging.getLogger("bagua")


class Addition(NamedTuple):
    """What parameters were given."""

    steps: int  # of this rank's optimizer since the copy
    exchange: int  # its number since the loop was started
    exchange_s: float  # what it took


class BackgroundAverage:
    """Nothing happens in a group of one rank.

    Attributes:
        update_groups: of the parameters.
    """

    def __init__(self, process_group: BaguaProcessGroup) -> None:
        self.update_groups = UpdateGroups()
        self._process_group = process_group
        self._group: AveragingGroup | None = None
        self._keep_group: Callable[[], object] = lambda: None
        self._loop: AveragingLoop | None = None
        self._keep_loop: Callable[[], Any] | None = None  # it does not end any more when this object is freed

    @property
    def failure(self) -> BaseException | None:
        """Why there is nothing to wait for any more."""
        return None if self._loop is None else self._loop.failure

    @property
    def has_loop(self) -> bool:
        """Whether `start` was called, and no end since."""
        return self._loop is not None

    def prepare(self, device: torch.device) -> None:
        """Make the group, if there is none. Every rank calls it."""
        if self._group is None and self._process_group.size > 1:
            self._group = create_averaging_group(self._process_group, device)
            self._keep_group = destroyed_after(self, self._group)

    @torch.inference_mode(False)  # what is made here is used in later passes
    def start(self, buckets: Sequence[Bucket], interval_s: float) -> None:
        """Start the loop for the parameters of these buckets. Every rank does, before any of them calls `begin`."""
        self.update_groups.divide(buckets)
        if self._group is None:
            return  # alone: nobody to average with
        owners = self.update_groups.owners.values()
        counts = iter(count_once([tensor for owner in owners for bucket in owner.buckets for tensor in bucket.tensors]))
        parts = [
            Part([BucketAverage(bucket, [next(counts) for _ in bucket.tensors]) for bucket in owner.buckets])
            for owner in owners
        ]
        self._loop = AveragingLoop(parts, self._group, interval_s)
        self._loop.start()
        self._keep_group()
        # A module that is dropped ends its loop. The finalizer holds the loop, and with it the copies.
        finalizer = weakref.finalize(self, self._loop.leave, destroy_group=True)
        finalizer.atexit = False
        self._keep_loop = finalizer.detach

    def begin(self) -> None:
        """This rank trains from now on."""
        if self._loop is not None:
            self._loop.begin(*self.update_groups.state())

    # --- safe points -------------------------------------------------------------------------------------------------

    def finish_group_update(self, position: int) -> Addition | None:
        """An optimizer has made a step.

        Returns:
            what its parameters were given, if anything.
        """
        owner = self.update_groups.owners.get(position)
        if owner is None:
            return None
        owner.steps += 1
        if self._loop is None:
            return None
        index = list(self.update_groups.owners).index(position)
        steps = self._loop.safe_point(index, owner.parameters, owner.steps)
        return None if steps is None else Addition(steps, self._loop.exchanges, self._loop.exchange_s)

    def pass_safe_point_of_rest(self) -> Addition | None:
        """A forward pass begins: those whom none of the optimizers steps have their safe point, if somebody has changed
        them. Returns as `finish_group_update`."""
        if not self.update_groups.rest_has_changed():
            return None
        addition = self.finish_group_update(self.update_groups.rest)
        self.update_groups.look_at_rest()
        return addition

    # --- the end -----------------------------------------------------------------------------------------------------

    def end(self) -> list[Addition]:
        """End the loop together with all other ranks; `start` may come again.

        Returns:
            what parameters were given.

        Raises:
            RuntimeError: a rank is gone, or did not come in time.
        """
        if self._loop is None:
            return []
        steps = self._loop.end(*self.update_groups.state(), self._process_group.timeout.total_seconds())
        additions = [Addition(one, self._loop.exchanges, self._loop.exchange_s) for one in steps]
        self._forget_loop()
        if self._group is not None:
            self._keep_group = destroyed_after(self, self._group)
        return additions

    def finish(self) -> list[Addition]:
        """As `end`, and give the group back. If the ranks cannot be brought together any more, that is a warning."""
        additions: list[Addition] = []
        group, self._group = self._group, None
        try:
            if group is not None and group.is_registered:
                additions = self.end()
        except RuntimeError as error:
            # Whoever wraps the module next finds that out.
            _logger.warning(f"averaging ended with an error: {error}")
            group = None
            if self._loop is not None and self._loop.failure is None:  # the parameters were converted
                self._loop.leave(destroy_group=True)
        self._forget_loop()
        self._keep_group()
        if group is not None:
            group.destroy()
        return additions

    def _forget_loop(self) -> None:
        if self._keep_loop is not None:
            self._keep_loop()
        self._loop, self._keep_loop = None, None
