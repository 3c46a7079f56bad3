"""What a loop's two threads share: parameters in parts, the averages of each, and the GPU streams that work on them.

Only flags and copies: who may touch what, and when, is the loop's (bagua.comm_ops.averaging_loop).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from bagua.collectives.process_group import STREAM_PRIORITY
from bagua.comm_ops.async_average import BucketAverage


class Part:
    """Parameters with a safe point of their own: those that one optimizer steps.

    Attributes:
        averages: of its buckets.
        is_copied: in this turn.
        is_owed: the parameters have not been given the differences yet.
        is_idle: it let the patience run out, and had no safe point since.
        copied_at: the number of steps when it was copied last.
    """

    def __init__(self, averages: Sequence[BucketAverage]) -> None:
        self.averages = list(averages)
        self.is_copied = self.is_owed = False
        self.is_idle = True
        self.copied_at = 0


class AveragingMemory:
    """The averages of all parts.

    Args:
        parts: with memory that nobody else uses.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self._averages = [average for part in parts for average in part.averages]
        devices = {average.contribution.device for average in self._averages}
        self._devices = sorted((device for device in devices if device.type == "cuda"), key=str)
        # What the training thread queued last, by stream.
        self._queued: dict[torch.cuda.Stream, torch.cuda.Event] = {}

    # --- the training thread -----------------------------------------------------------------------------------------

    def give(self, part: Part, parameters: Sequence[Sequence[Tensor]], step: int) -> int | None:
        """Add what the parameters are owed.

        Returns:
            how many steps were made since the copy; None: nothing was owed.
        """
        if not part.is_owed:
            return None
        part.is_owed = False
        for average, tensors in zip(part.averages, parameters, strict=True):
            average.give(tensors)
        self._note_queued(part)
        return step - part.copied_at

    def copy(self, part: Part, parameters: Sequence[Sequence[Tensor]], step: int) -> None:
        """Copy the parameters. Arguments as `give`."""
        for average, tensors in zip(part.averages, parameters, strict=True):
            average.copy_from(tensors)
        part.is_copied, part.copied_at = True, step
        self._note_queued(part)

    def _note_queued(self, part: Part) -> None:
        """The loop's stream waits for what this thread's streams do with the memory."""
        for device in self._devices:
            stream = torch.cuda.current_stream(device)
            self._queued[stream] = stream.record_event()
            for average in part.averages:
                if average.contribution.device == device:
                    average.keep_for(stream)

    # --- the loop's thread -------------------------------------------------------------------------------------------

    def take_queued(self) -> list[torch.cuda.Event]:
        """What the loop's streams have to wait for since the last call."""
        queued, self._queued = list(self._queued.values()), {}
        return queued

    @contextlib.contextmanager
    def on_own_streams(self) -> Iterator[list[torch.cuda.Stream]]:
        """This thread works on a stream of its own on each GPU; gives them."""
        streams: list[torch.cuda.Stream] = []
        with contextlib.ExitStack() as stack:
            for device in self._devices:
                torch.cuda.set_device(device)  # of this thread
                streams.append(torch.cuda.Stream(device, STREAM_PRIORITY))  # type: ignore[no-untyped-call]
                stack.enter_context(torch.cuda.stream(streams[-1]))
                # The loop may end, and its memory be freed, while its stream has not come to the end.
                for average in self._averages:
                    if average.contribution.device == device:
                        average.keep_for(streams[-1])
            yield streams

    def scratch(self) -> Scratch:
        """New memory for `BucketAverage.exchange`, on the current streams."""
        return Scratch([average.contribution for average in self._averages])


class Scratch:
    """One piece for each dtype and device, as long as the longest of `tensors`."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        longest: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        for one in tensors:
            kind = (one.dtype, one.device)
            if kind not in longest or longest[kind].numel() < one.numel():
                longest[kind] = one
        self._pieces = {kind: torch.empty_like(one) for kind, one in longest.items()}

    def like(self, tensor: Tensor) -> Tensor:
        """The piece of its dtype and device."""
        return self._pieces[tensor.dtype, tensor.device]
