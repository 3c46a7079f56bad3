"""Samplers under regroup: what one that follows does, and which ones do not.

Functions; on the training thread.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from typing import Any, Protocol

from torch.utils.data import DistributedSampler

_logger = logging.getLogger("bagua")

Position = dict[str, Any]  # what a sampler says of itself, of JSON's types


class FollowingSampler(Protocol):
    """Hands out what is left of an epoch: bagua.torch_api.contrib.regroup_sampler."""

    def end_step(self, is_first: bool) -> None:
        """An optimizer has stepped.

        Args:
            is_first: of a step of the job: what that was made of is done. Otherwise, it is the last of several.

        Raises:
            RuntimeError: samples were drawn between two of them.
        """

    def position(self, step: int) -> Position:
        """
        Args:
            step: steps that this process has made, if only with some of its optimizers.

        Returns:
            what the others need to know of this rank.
        """

    def follow(self, positions: Sequence[Position | None], rank: int, kept: Sequence[bool]) -> None:
        """Divide what is left anew.

        Args:
            positions: of all members, in rank order. None: it has no such sampler.
            rank: of this process.
            kept: for each member, whether its loop goes on with what it was given for the present step.

        Raises:
            RuntimeError: the ranks contradict each other.
        """

    def state_dict(self) -> dict[str, Any]:
        """Where all ranks are in the epoch, with the steps that are done."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on there."""


def _fixed_samplers() -> list[str]:
    """Those of this process that were made for a number of ranks."""
    kinds: set[type[Any]] = {DistributedSampler}
    while not kinds.issuperset(more := {below for kind in kinds for below in kind.__subclasses__()}):
        kinds |= more
    # Their constructors are not watched, since many are made before init_process_group.
    alive = [one for one in gc.get_objects() if type(one) in kinds]
    return sorted({type(one).__name__ for one in alive if one.num_replicas > 1})


def warn_of_fixed_samplers(has_following: bool) -> None:
    """Training begins, or goes on after a loss.

    Args:
        has_following: the program trains with samplers that follow. Those with a fixed number are for evaluation then.
    """
    if names := _fixed_samplers():
        _logger.warning(
            f"regroup: {', '.join(names)} hands out samples to a fixed number of ranks. "
            + (
                "Those of a lost rank go to nobody.\nFor evaluation, make a sampler anew each time. For training, use"
                " bagua.torch_api.contrib.RegroupSampler."
                if has_following
                else "When a rank is lost, training ends with an error, because its samples would go to nobody.\n"
                "Use bagua.torch_api.contrib.RegroupSampler."
            )
        )


def refuse_fixed_samplers(lost: Sequence[int], world_size: int) -> None:
    """Of a program that trains without samplers that follow.

    Args:
        lost: ranks that are gone.
        world_size: now.

    Raises:
        RuntimeError: the samples of lost ranks would go to nobody.
    """
    if lost and (names := _fixed_samplers()):
        raise RuntimeError(
            f"regroup: {len(lost)} of {world_size + len(lost)} ranks are gone, and {', '.join(names)} would hand out"
            " their samples to nobody.\n"
            "Use bagua.torch_api.contrib.RegroupSampler for training. For evaluation, make a sampler anew each time,"
            " and keep it no longer."
        )
