"""The broadcast of a module's buffers at the start of a forward pass: one message, whose memory is kept.

Owned by a wrapper; runs on the thread of forward, on its current stream.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bagua.collectives.failure_report import failures_named

if TYPE_CHECKING:
    from bagua.collectives.process_group import BaguaProcessGroup


# Of each dtype's part of the message, in bytes: no dtype has larger elements.
_ALIGNMENT = 16


class BufferBroadcast:
    """
    Args:
        module: its buffers are dense, of one device that the group has a backend for, and alike on all ranks. They may
            be replaced by others, as `self.mean = 0.9 * self.mean + ...` does, or given other memory (`.data = ...`).
        ignored: names of buffers that are left alone.
        group: whose ranks have the same buffers.
    """

    def __init__(self, module: nn.Module, ignored: Sequence[str], group: BaguaProcessGroup) -> None:
        self._group = group
        # Where the buffers are found: going through the module takes longer than looking at all of them.
        self._places: list[tuple[str, dict[str, Tensor | None], str]] = []
        for prefix, owner in module.named_modules():
            for key in owner._buffers:
                name = f"{prefix}.{key}" if prefix else key
                if name not in ignored:
                    self._places.append((name, owner._buffers, key))
        self._buffers: list[Tensor] = []
        # Where each of them lies. What lay there before is held by its portion, so that nothing else can come there.
        self._addresses: list[int] = []
        self._portions: list[_Portion] = []
        # Of bytes: not every backend knows every dtype, and one message is cheaper than one for each.
        self._message: Tensor | None = None

    @property
    def has_buffers(self) -> bool:
        return bool(self._places)

    def named_buffers(self) -> list[tuple[str, Tensor]]:
        """(name, buffer), each once, as they are now."""
        found: dict[int, tuple[str, Tensor]] = {}
        for name, owner, key in self._places:
            buffer = owner.get(key)
            if buffer is not None:
                found.setdefault(id(buffer), (name, buffer))
        return list(found.values())

    def run(self, source: int = 0) -> None:
        """Overwrite the buffers with those of group rank `source`. Autograd does not see it, as with torch's DDP: a
        forward pass whose backward pass is still to come may have used them.

        Raises:
            RuntimeError: communication failed; names the ranks that are gone, where that can be found out.
        """
        self._look()
        communicator = self._group.get_global_communicator()
        is_source = communicator.rank() == source
        with torch.no_grad(), failures_named(self._group, "broadcasting buffers", in_order=True):
            if self._message is None:
                return
            for portion in self._portions if is_source else ():
                torch._foreach_copy_(portion.parts, portion.buffers)
            dist.broadcast(self._message, communicator.ranks[source], group=communicator.torch_group)
            for portion in self._portions if not is_source else ():
                torch._foreach_copy_(portion.buffers, portion.parts)

    def _look(self) -> None:
        """Make the messages anew if the buffers, or the memory they lie in, are others than before."""
        buffers = [buffer for _, buffer in self.named_buffers()]
        if (
            len(buffers) == len(self._buffers)
            and all(map(operator.is_, buffers, self._buffers))
            and all(map(operator.eq, map(Tensor.data_ptr, buffers), self._addresses))
        ):
            return
        self._buffers, self._addresses = buffers, [buffer.data_ptr() for buffer in buffers]
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for buffer in buffers:
            if buffer.numel():
                by_dtype.setdefault(buffer.dtype, []).append(buffer)
        self._portions, self._message = [], None
        sizes = {dtype: sum(tensor.numel() for tensor in tensors) for dtype, tensors in by_dtype.items()}
        lengths = [-(-size * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT for dtype, size in sizes.items()]
        if not lengths:
            return
        with torch.inference_mode(False):  # this memory is used in later passes
            self._message = torch.empty(sum(lengths), dtype=torch.uint8, device=buffers[0].device)
            for piece, (dtype, tensors) in zip(torch.split(self._message, lengths), by_dtype.items(), strict=True):
                self._portions.append(_Portion(tensors, piece.view(dtype)[: sizes[dtype]]))


class _Portion:
    """Buffers of one dtype, and a view of the message's memory for each."""

    def __init__(self, buffers: list[Tensor], flat: Tensor) -> None:
        # The same memory, but a version of its own, so that autograd does not see that it is written.
        self.buffers = [buffer.data for buffer in buffers]
        pieces = torch.split(flat, [buffer.numel() for buffer in buffers])
        self.parts = [piece.view(buffer.shape) for piece, buffer in zip(pieces, buffers, strict=True)]
