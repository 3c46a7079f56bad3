"""A sampler that hands out what is left of an epoch to the ranks that are there. An object of one process, on the
thread that trains.

[Note: rows] What is left is divided into a table with a column per rank. All ranks go down their columns at the same
speed: each step takes the same number of rows, so the rows that are done say which samples are, those of a lost rank
included. When the ranks change, the rest is divided anew. What a rank has fetched already stands on top of its column.
All ranks come to the same table without communicating, from what each has said of itself (`position`).

[Note: done] A DataLoader with workers fetches ahead. Which batches it has given to the loop is read from its iterator,
that is found by who asks for indices. Those that were given when the optimizer steps are done. Those that were given
since then are lost to the loop when the step is dropped, and come again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from bagua.contrib.resumable_sampler import refuse_second_split
from bagua.misuse import check_flags, check_integers
from bagua.regroup import coordinator


class RegroupSampler(Sampler[int]):
    """
    Indices of samples for this rank, among all that are there: each sample of an epoch is trained once, also if ranks
    are lost meanwhile. Without `init_process_group(regroup=...)`, it gives what torch's DistributedSampler gives.

    A sample is done when the optimizer step is that it was drawn for. If a step is dropped, its samples are handed out
    again, to the same ranks. Those of a lost rank go to the others, except what was done. All ranks end an epoch at the
    same step.

    What it needs of the loop:

    - A DataLoader, with `batch_size` or a BatchSampler of that size, the same on all ranks, in order.
    - A step's batches are drawn after the step before it, by the thread that trains; equally many on all ranks. With
      several models, before the first optimizer steps. If there are several batches, because of gradient accumulation
      or several models, give their number as `accumulation`, so that no step has batches of two epochs.
    - One iterator at a time. After `Regrouped`, the loop draws a new batch.

    To evaluate, use another sampler: without optimizer steps, samples are never done.

    Args:
        dataset: what has a length.
        seed: of the order, the same on all ranks.
        shuffle: draw the order from `seed` and the epoch. Otherwise it is that of the dataset.
        drop_last: leave out what does not fill a step of all ranks at the end of an epoch. Otherwise samples are
            repeated to fill it. Without regroup, what does not fill one sample of each rank.
        accumulation: batches of a step, on each rank.

    Attributes:
        epoch: what `set_epoch` or `load_state_dict` said last; 0 at first.

    Raises:
        RuntimeError: torch.distributed is not initialized.
        TypeError: seed or accumulation is not an integer, or shuffle or drop_last neither True nor False.
        ValueError: accumulation is below 1.
    """

    epoch: int

    def __init__(
        self, dataset: Sized, seed: int = 0, shuffle: bool = True, drop_last: bool = False, accumulation: int = 1
    ) -> None:
        check_integers(seed=seed, accumulation=accumulation)
        check_flags(shuffle=shuffle, drop_last=drop_last)
        if accumulation < 1:
            raise ValueError(f"accumulation is {accumulation}, must be at least 1")
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "RegroupSampler: torch.distributed is not initialized.\n"
                "Call bagua.torch_api.init_process_group() before making the sampler."
            )
        self.dataset, self.seed, self.shuffle, self.drop_last = dataset, seed, shuffle, drop_last
        self.accumulation = accumulation
        self.epoch = 0
        self._step_size = 1  # samples of a step, on each rank
        self._pass: _Pass | None = None
        self._share: _Share | None = None
        self._continues = False  # the next iterator, with the present pass
        regrouping = coordinator.current()
        if regrouping is not None:
            regrouping.add_sampler(self)

    def set_epoch(self, epoch: int) -> None:
        """The order of iterators that begin from now on. The same on all ranks.

        Args:
            epoch: any integer from 0 on. Another one than that of a loaded state begins at its start.
        """
        self.epoch = epoch

    def __len__(self) -> int:
        """Of a whole epoch, for one of the ranks that are there now."""
        return self._rows(len(self.dataset), dist.get_world_size())

    def __iter__(self) -> Iterator[int]:
        """
        An epoch, or what is left of one after `load_state_dict`.

        Raises:
            ValueError: under regroup: the DataLoader has `in_order=False`, or a batch sampler without `batch_size`.
        """
        loader = _Loader()
        if self._share is not None and self._share.loader.is_asking_again(loader):
            return self._share
        regrouping = coordinator.current()
        rank, world_size = dist.get_rank(), dist.get_world_size()
        refuse_second_split(rank, world_size)
        step = 0
        if regrouping is not None:
            step, self._step_size = regrouping.step, loader.batch_size() * self.accumulation
        one = self._pass
        # One that has begun at this step, in which nothing is done: it may have been divided with other ranks.
        is_anew = regrouping is not None and one is not None and one.begin == step
        if one is None or one.epoch != self.epoch or not (self._continues or is_anew):
            one = self._begin(self.epoch)
        if one.table is None:
            one.begin = step
            self._divide(one, [[]] * world_size)
        self._pass, self._continues = one, False
        self._share = _Share(one.column(rank), loader)
        return self._share

    def state_dict(self) -> dict[str, Any]:
        """
        Returns:
            "epoch", "begin" and "rows" (of the epoch that has begun), "left" (bool, for each sample of the dataset
            whether it is still to be done) and "settings". The same on all ranks between two steps. Without regroup,
            what the DataLoader has given to the loop is done.
        """
        one = self._pass
        if coordinator.current() is None:
            self.end_step()
        if one is None or one.epoch != self.epoch:
            one = self._begin(self.epoch)
        left, rows = one.after(one.done)
        return {"epoch": one.epoch, "begin": one.begin, "rows": rows, "left": left, "settings": self._settings()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the epoch to that of the state. The next iterator has what is left of it, divided among the ranks that
        are there, unless `set_epoch` names another epoch before.

        Args:
            state_dict: of any rank, and any number of ranks.

        Raises:
            KeyError: it is not such a state.
            ValueError: it is of a sampler with other settings, whose order is another. Nothing is changed then.
        """
        ours, theirs = self._settings(), state_dict["settings"]
        if theirs != ours:
            raise ValueError(
                f"The state is of another order of samples: of {theirs}; this sampler has {ours}.\n"
                "Make the sampler with the same settings."
            )
        one = self._begin(int(state_dict["epoch"]))
        one.begin, one.rows, one.left = int(state_dict["begin"]), int(state_dict["rows"]), state_dict["left"].clone()
        self.epoch, self._pass, self._share, self._continues = one.epoch, one, None, True

    # --- bagua.regroup.samplers.FollowingSampler ----------------------------------------------------------------------

    def end_step(self, is_first: bool = True) -> None:
        """See FollowingSampler.

        Raises:
            RuntimeError: as said there.
        """
        if self._pass is None or self._share is None:
            return
        given = self._share.given()
        if not is_first and given != self._pass.done:
            raise RuntimeError(
                "RegroupSampler: batches were drawn between the optimizers' steps of one step of the job.\n"
                f"{given - self._pass.done} samples of this rank. If a rank is lost, nobody would know whether they"
                " were trained.\n"
                "Draw all batches of a step before its first backward pass, and pass their number: accumulation=2."
            )
        self._pass.done = given

    def position(self, step: int) -> dict[str, Any]:
        """See FollowingSampler."""
        one, share = self._pass, self._share
        said: dict[str, Any] = {"settings": self._settings(), "step_size": self._step_size, "step": step}
        if one is None or one.table is None:
            return said
        own: list[int] = []
        given = 0
        if share is not None:
            own, given = share.column[one.done : share.fetched()], share.given() - one.done
        return {
            **said,
            "epoch": one.epoch,
            "begin": one.begin,
            "rows": one.rows + one.done,
            "is_over": one.done == len(one.table),
            "own": own,
            "given": given,
        }

    def follow(self, positions: Sequence[Mapping[str, Any] | None], rank: int, kept: Sequence[bool]) -> None:
        """See FollowingSampler."""
        known = [one for one in positions if one is not None and "begin" in one]
        if not known:
            return
        begin = max(one["begin"] for one in known)
        # Others have not begun the epoch yet.
        there = [one for one in known if one["begin"] == begin]
        _check(known, there)
        epoch, rows = there[0]["epoch"], max(one["rows"] for one in there)
        mine, share = self._pass, self._share
        if mine is None or (mine.begin != begin and not (self._continues and mine.epoch == epoch)):
            mine = self._begin(epoch)
            if share is not None:
                share.end()
            self._share = share = None
        if mine.table is not None:
            mine.left, mine.rows = mine.after(rows - mine.rows)
        owned, still_given = [], 0
        for other, (one, is_kept) in enumerate(zip(positions, kept, strict=True)):
            own: list[int] = []
            if one is not None and one.get("begin") == begin:
                late = rows - one["rows"]  # its last step counts, although it has not made it
                own, lost = one["own"][late:], 0 if is_kept else max(0, one["given"] - late)
                own = own[lost:] + own[:lost]
                if other == rank and is_kept:
                    still_given = one["given"]
            owned.append(own)
        self._step_size, mine.begin = there[0]["step_size"], begin
        self._divide(mine, owned, is_over=any(one["is_over"] for one in there))
        self._pass, self._continues = mine, share is None
        if share is not None:
            share.go_on(mine.column(rank), still_given)

    # --- the table ---------------------------------------------------------------------------------------------------

    def _settings(self) -> dict[str, Any]:
        return {
            "samples": len(self.dataset),
            **{name: getattr(self, name) for name in ("seed", "shuffle", "drop_last")},
        }

    def _begin(self, epoch: int) -> _Pass:
        size = len(self.dataset)
        if self.shuffle:
            order = torch.randperm(size, generator=torch.Generator("cpu").manual_seed(self.seed + epoch), device="cpu")
        else:
            order = torch.arange(size, device="cpu")
        return _Pass(epoch, order, torch.ones(size, dtype=torch.bool, device="cpu"))

    def _rows(self, samples: int, world_size: int) -> int:
        size = world_size * self._step_size
        return (samples // size if self.drop_last else -(-samples // size)) * self._step_size

    def _divide(self, one: _Pass, owned: Sequence[list[int]], is_over: bool = False) -> None:
        """Sets its table.

        Args:
            one: with what is left.
            owned: samples that each rank has fetched. They are on top of its column.
            is_over: the last step is done. What is left then is left out.
        """
        left = one.left.clone()
        for own in owned:
            left[own] = False
        pool = one.order[left[one.order]]
        counts = torch.tensor([len(own) for own in owned], device="cpu")
        rows = 0
        if not is_over:
            rows = max(self._rows(len(pool) + int(counts.sum()), len(owned)), int(counts.max()))
        table = torch.empty(rows, len(owned), dtype=torch.long, device="cpu")
        # Row by row, as torch's DistributedSampler does.
        is_free = torch.arange(rows, device="cpu").unsqueeze(1) >= counts
        free = int(is_free.sum())
        if free > len(pool):
            repeats = torch.arange(free - len(pool), device="cpu") % len(one.order)
            pool = torch.cat([pool, one.order[repeats]])
        table[is_free] = pool[:free]
        for rank, own in enumerate(owned):
            table[: len(own), rank] = torch.tensor(own, dtype=torch.long, device="cpu")
        one.table, one.done = table, 0


@dataclass
class _Pass:
    """An epoch of the dataset.

    Attributes:
        epoch: that `set_epoch` said.
        order: of all samples.
        left: for each sample, whether it is still to be done. Of when the table was made.
        begin: the optimizer step at which it began.
        rows: that were done of tables before the present one.
        table: of samples, (rows, ranks). None: not divided yet.
        done: rows of the table that this rank has made steps of.
    """

    epoch: int
    order: Tensor
    left: Tensor
    begin: int = 0
    rows: int = 0
    table: Tensor | None = None
    done: int = 0

    def column(self, rank: int) -> list[int]:
        assert self.table is not None
        return self.table[:, rank].tolist()

    def after(self, done: int) -> tuple[Tensor, int]:
        """`left` and `rows` when so many rows of the table are done."""
        left = self.left.clone()
        if self.table is not None:
            left[self.table[:done].flatten()] = False
        return left, self.rows + done


class _Share(Iterator[int]):
    """What this rank gets: a column of the table, which is another one when the ranks change.

    Args:
        column: of samples.
        loader: that asks for it.
    """

    def __init__(self, column: list[int], loader: _Loader) -> None:
        self.column, self.loader = column, loader
        self._next = 0
        self._before = 0  # what was handed out before the top of the column
        self._is_exhausted = False

    def __next__(self) -> int:
        if self._next == len(self.column):
            self._is_exhausted = True
            raise StopIteration
        self._next += 1
        return self.column[self._next - 1]

    def given(self) -> int:
        """How many the loop has been given."""
        return self.loader.given(self._before + self._next) - self._before

    def fetched(self) -> int:
        """How many have been given, or are on their way."""
        return self.loader.fetched(self._before + self._next) - self._before

    def go_on(self, column: list[int], kept: int) -> None:
        """
        Args:
            column: has what is on its way on its top, behind what is kept.
            kept: how many of it have been given to the loop.
        """
        before, following = self._before + self.given() - kept, self._before + self.fetched()
        self.column, self._before, self._next = column, before, following - before
        if self._is_exhausted and self._next < len(column):
            self._is_exhausted = False
            self.loader.ask_again()

    def end(self) -> None:
        """Nothing comes any more."""
        self.column = self.column[: self._next]


class _Loader:
    """The iterator of a DataLoader that has called this process's sampler, if one has."""

    def __init__(self) -> None:
        frame: FrameType | None = sys._getframe(1)
        iterator = None
        while frame is not None and iterator is None:
            caller = frame.f_locals.get("self")
            iterator = caller if isinstance(caller, _BaseDataLoaderIter) else None
            frame = frame.f_back
        self._iterator: Any = iterator
        self._asking: Iterator[Any] | None = None
        size = 1
        if iterator is not None and iterator._auto_collation:
            size = getattr(iterator._index_sampler, "batch_size", 0)
        self._size = size

    def batch_size(self) -> int:
        """
        Raises:
            ValueError: it is not known, or batches come in another order than they were asked for.
        """
        iterator = self._iterator
        if iterator is not None and not getattr(iterator, "_in_order", True):
            raise ValueError(
                "RegroupSampler: the DataLoader has in_order=False. Then nobody knows which samples an optimizer step"
                " was made of.\nLeave in_order out."
            )
        if not self._size:
            raise ValueError(
                f"RegroupSampler: the DataLoader's {type(iterator._index_sampler).__name__} has no batch_size.\n"
                "Under regroup, all batches have the same size. Set batch_size at your batch sampler, or pass"
                " batch_size to the DataLoader."
            )
        return self._size

    def given(self, handed_out: int) -> int:
        """How many samples it has given to the loop.

        Args:
            handed_out: by the sampler.
        """
        return self._batches(handed_out)[0]

    def fetched(self, handed_out: int) -> int:
        """How many it has given or is about to give. Of what was handed out, it leaves out an incomplete batch."""
        return self._batches(handed_out)[1]

    def _batches(self, handed_out: int) -> tuple[int, int]:
        iterator = self._iterator
        if iterator is None or not self._size:
            return handed_out, handed_out
        given = iterator._num_yielded
        fetched = getattr(iterator, "_send_idx", given)
        return min(given * self._size, handed_out), min(fetched * self._size, handed_out)

    def ask_again(self) -> None:
        """The sampler has said that nothing is left, and something is now."""
        iterator = self._iterator
        if iterator is None or getattr(iterator, "_shutdown", False):
            return
        # A generator, as that of a BatchSampler is, asks no more once it has ended.
        self._asking = iterator._sampler_iter = iter(iterator._index_sampler)
        if hasattr(iterator, "_try_put_index"):
            # As many as it would have on their way. Some of them may have arrived, and wait for others.
            most, before = iterator._prefetch_factor * iterator._num_workers, -1
            while before < iterator._send_idx < iterator._num_yielded + most:
                before = iterator._send_idx
                iterator._try_put_index()

    def is_asking_again(self, caller: _Loader) -> bool:
        """
        Args:
            caller: who calls the sampler.

        Returns:
            whether it does because of `ask_again`.
        """
        return (
            self._asking is not None
            and caller._iterator is self._iterator
            and self._iterator._sampler_iter is self._asking
        )


def _check(known: Sequence[Mapping[str, Any]], there: Sequence[Mapping[str, Any]]) -> None:
    """
    Args:
        known: positions of ranks.
        there: those of them that are in the last epoch that has begun.

    Raises:
        RuntimeError: the ranks contradict each other.
    """
    step = max(one["step"] for one in known)
    for name, ours in (
        ("settings", known),
        ("step_size", there),
        ("epoch", there),
        # Steps of this epoch were made, so that all ranks are in it.
        ("begin", known if step > there[0]["begin"] else there),
        ("rows", [one for one in there if one["step"] == step]),
    ):
        values = [one[name] for one in ours]
        if any(one != values[0] for one in values):
            raise RuntimeError(
                f"RegroupSampler: ranks differ in {name}: {', '.join(str(one) for one in values)}, after step {step}.\n"
                "What is left of the epoch cannot be divided among them.\n"
                "Make samplers and DataLoaders with the same arguments on all ranks, draw equally many batches for each"
                " step, and use one iterator at a time."
            )
