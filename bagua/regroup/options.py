"""What a user says of regrouping: the argument `regroup` of `init_process_group`."""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping
from typing import Any

import torch

from bagua.collectives.process_group import BaguaProcessGroup
from bagua.env import read_text
from bagua.job.torch_internals import Store
from bagua.misuse import shown

ON_LOSS = ("drop", "repeat")


class Regroup:
    """
    Lets a job go on without ranks that it loses, and with others that join: `init_process_group(regroup=Regroup())`.
    On CPUs with gloo or on GPUs with NCCL, for models that are wrapped with their optimizers before training begins.

    `python -m bagua.distributed.run --regroup` starts the ranks of a node. Where others start them, the store at
    MASTER_ADDR and MASTER_PORT must live on if a rank dies: the same command with `--store-only` serves it. When a rank
    is lost, the step in which that happened is dropped on all others, or counts on all of them, if one of them had made
    it. With several models, it counts if one of them has stepped, and the rest of it is dropped. A process that is
    started while the job has begun joins it when its models are wrapped.

    Args:
        min_ranks: with how many ranks the job may go on, at least. None: more than half of those that were there before
            the loss.
        state: what has to be the same on all ranks beside model and optimizer, by name: objects with `state_dict` and
            `load_state_dict`, such as a learning rate scheduler or a GradScaler. A rank that is a step behind the
            others when one is lost takes theirs, and so does one that joins.
        on_loss: "drop": the step in which a rank was lost is dropped. "repeat": it is not. The gradients of the ranks
            that are left are averaged anew, before `backward()` returns. This takes the memory of one more set of
            gradients. Of several models, a backward pass is repeated until it returns, if no optimizer has stepped and
            no other backward pass has returned in the step; otherwise the rest of the step is dropped.

    Raises:
        TypeError: `min_ranks` is not an integer, or `state` is not a mapping of objects with both methods.
        ValueError: `min_ranks` is below 1, or `on_loss` is unknown.
    """

    def __init__(
        self, min_ranks: int | None = None, state: Mapping[str, Any] | None = None, on_loss: str = "drop"
    ) -> None:
        if min_ranks is not None and (isinstance(min_ranks, bool) or not isinstance(min_ranks, int)):
            raise TypeError(f"min_ranks is {shown(min_ranks)}. Pass a number of ranks, or None for more than half.")
        if min_ranks is not None and min_ranks < 1:
            raise ValueError(f"min_ranks={min_ranks} must be at least 1, or None for more than half.")
        if on_loss not in ON_LOSS:
            raise ValueError(f'on_loss={on_loss!r} is unknown. Pass "drop" or "repeat".')
        self.min_ranks = min_ranks
        self.on_loss = on_loss
        if state is not None and not isinstance(state, Mapping):
            raise TypeError(f'state is {shown(state)}. Pass objects by name: state={{"scheduler": scheduler}}.')
        self.state = dict(state or {})
        for name, one in self.state.items():
            if not all(callable(getattr(one, method, None)) for method in ("state_dict", "load_state_dict")):
                raise TypeError(
                    f"state[{name!r}] is {shown(one)}, which has no state_dict and load_state_dict.\n"
                    "Pass objects that have both, such as a learning rate scheduler."
                )

    def begin(
        self, store: Store, rank: int, world_size: int, timeout: datetime.timedelta, device: torch.device | None
    ) -> BaguaProcessGroup:
        """By `init_process_group` alone: makes the default group of the job's first epoch, or, if that is over, one of
        this process alone.

        Args:
            store: of the job; it is served by a process that is not one of the ranks.
            rank: of this process in the first epoch.
            world_size: of the first epoch.
            timeout: of collectives, and of each regroup.
            device: the GPU of this process, on which NCCL communicates; None: gloo alone.

        Raises:
            RuntimeError: the job's ranks have other settings.
        """
        from bagua.regroup import coordinator

        return coordinator.begin(self, store, rank, world_size, timeout, device)

    def check_launcher(self) -> None:
        """
        Raises:
            ValueError: torchrun has started this process. It ends all processes of a node when one of them dies.
        """
        if read_text(os.environ, "TORCHELASTIC_RUN_ID") is not None:
            raise ValueError(
                "regroup: torchrun has started this process, and ends all processes of its node when one of them"
                " dies.\n"
                "Start the ranks of each node by python -m bagua.distributed.run --regroup."
            )

    def end(self) -> None:
        """This process leaves the job."""
        from bagua.regroup import coordinator

        coordinator.stop()
