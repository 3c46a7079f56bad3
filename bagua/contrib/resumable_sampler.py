"""Samplers of epochs that continue in the middle of one: `state_dict` and `load_state_dict`, as torchdata's
StatefulDataLoader calls them. An object of one process and one thread.

Also what refuses that Accelerate splits such a sampler's items, which are the share of one rank, once more. Lightning
asks whether a sampler is a DistributedSampler. Accelerate asks nothing: who iterates is the only sign of it, and is
looked at once an epoch.
"""

from __future__ import annotations

import itertools
import sys
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, TypeVar

from torch.utils.data import Sampler

T = TypeVar("T")


class ResumableSampler(Sampler[T]):
    """What gives the items of one rank, epoch by epoch.

    Attributes:
        epoch: what `set_epoch` said last; 0 at first.
    """

    epoch: int

    def __init__(self) -> None:
        self._place = (0, 0)  # an epoch, and how many of its items the last iterator has given
        self._is_resuming = False  # the next iterator begins there

    @abstractmethod
    def set_epoch(self, epoch: int) -> None:
        """The order of iterators that begin from now on."""

    @abstractmethod
    def _epoch_items(self) -> Sequence[T]:
        """All that this rank gets in this epoch."""

    @abstractmethod
    def _settings(self) -> dict[str, Any]:
        """What determines the order, in addition to the costs."""

    def __iter__(self) -> Iterator[T]:
        """An epoch. After `load_state_dict` of a state of this epoch: the rest of it, once."""
        if not self._is_resuming:
            self._place = (self.epoch, 0)
        return self._counted(self.epoch, self._epoch_items())

    def _begin(self, epoch: int) -> int:
        """By an iterator that is asked for its first item: how many of the epoch it leaves out. One that is never asked
        has not continued the epoch: a DataLoader with workers makes two, and uses the second."""
        start = self._place[1] if self._is_resuming and self._place[0] == epoch else 0
        self._place, self._is_resuming = (epoch, start), False
        return start

    def _counted(self, epoch: int, items: Sequence[T]) -> Iterator[T]:
        start = self._begin(epoch)
        for number, item in enumerate(itertools.islice(items, start, None), start + 1):
            self._place = (epoch, number)
            yield item

    def __len__(self) -> int:
        """Of a whole epoch, also after `load_state_dict`."""
        return len(self._epoch_items())

    def state_dict(self) -> dict[str, Any]:
        """
        Returns:
            "epoch", "position" (the number of items that have been given in it) and "settings". A DataLoader with
            workers asks for more items than it has given: see `load_state_dict`.
        """
        epoch, position = self._place
        return {
            "epoch": self.epoch,
            "position": position if epoch == self.epoch else 0,
            "settings": self._settings(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the epoch to that of the state. The next iterator continues at its position, unless `set_epoch` names
        another epoch before; later ones begin at the start.

        Args:
            state_dict: of any rank, as all are at the same position. If the items that were trained on are fewer than
                those that the DataLoader has asked for, put their number under "position".

        Raises:
            KeyError: it is not such a state.
            ValueError: it is of a sampler with other settings, whose order is another, or the position is not in the
                epoch. Nothing is changed then.
        """
        epoch, position, theirs = int(state_dict["epoch"]), int(state_dict["position"]), state_dict["settings"]
        ours = self._settings()
        different = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
        if different:
            said = ", ".join(f"{name} is {ours.get(name)}, was {theirs.get(name)}" for name in different)
            raise ValueError(
                f"The state is of another order of samples: {said}.\nIt was saved by a sampler in epoch {epoch} at"
                f" position {position}.\nUse the same settings, or call set_epoch({epoch}) to begin that epoch anew."
            )
        before = self.epoch
        self.set_epoch(epoch)
        if not 0 <= position <= len(self):
            limit = len(self)
            self.set_epoch(before)
            raise ValueError(f"position is {position}, must be between 0 and {limit}, the length of epoch {epoch}")
        self._place, self._is_resuming = (epoch, position), True


_MODULE = "accelerate.data_loader"
_SPLITTERS = ("BatchSamplerShard.", "DataLoaderDispatcher.")


def refuse_second_split(rank: int, num_replicas: int) -> None:
    """
    Args:
        rank: whose share the caller is about to give.
        num_replicas: how many shares there are. With one, which is all samples, Accelerate may split them.

    Raises:
        RuntimeError: Accelerate asks for the share, to give this process a part of it.
    """
    frame: FrameType | None = sys._getframe(1) if num_replicas > 1 and _MODULE in sys.modules else None
    while frame is not None:
        if frame.f_globals.get("__name__") == _MODULE and frame.f_code.co_qualname.startswith(_SPLITTERS):
            raise RuntimeError(
                f"Accelerate splits the samples of rank {rank} once more, by {num_replicas} ranks: only a part of the"
                " dataset would be seen.\n"
                "accelerator.prepare() was given a DataLoader whose sampler has split the dataset already.\n"
                "Leave the DataLoader out of prepare(), and use accelerate.data_loader.prepare_data_loader(loader,"
                " accelerator.device, num_processes=1, process_index=0, put_on_device=True) instead."
            )
        frame = frame.f_back
