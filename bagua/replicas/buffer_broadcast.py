"""The broadcast of a module's buffers at the start of a forward pass: one message, whose memory is kept.

Owned by a wrapper; runs on the thread of forward, on its current stream.

[Note: buffers that change] Modules may register, replace and delete buffers while they are trained, usually alike on
all ranks. A message must have the same length on all of them, although nobody can ask the others first. So it is laid
out as they last agreed, and begins with the digest of what the source has now. If that is something else, all ranks see
it, compare what they have, and agree on a new layout or raise the same error. A rank that alone has other buffers than
the source raises by itself.

On CUDA the host would have to wait for the message to read the digest. It reads the one before instead, which has come
long ago: new buffers are broadcast one forward pass later, and those that are as before in between.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bagua.collectives.arguments import repeats_elements
from bagua.collectives.communicator import BaguaCommunicator
from bagua.collectives.process_group import BaguaProcessGroup
from bagua.job.failure_report import failures_named
from bagua.replicas.replica_check import DIGEST_BYTES, Replica
from bagua.replicas.tensor_broadcast import why_unsendable

_children_of = operator.attrgetter("_modules")
_buffers_of = operator.attrgetter("_buffers")
_keys_of = operator.methodcaller("keys")
_values_of = operator.methodcaller("values")


class ModuleBuffers:
    """The buffers of a module as they are now, wherever they have been registered, replaced or deleted meanwhile.

    To walk through a module as `named_buffers` does takes up to 2 % of a step, so it is done only when the tree of
    modules has changed. To see that, the dicts in which modules keep children and buffers are compared with what they
    held, in a few calls of C."""

    def __init__(self, module: nn.Module, ignored: Collection[str]) -> None:
        self._module = module
        self._ignored = frozenset(ignored)
        self._buffers: list[Tensor | None] = []
        self._named: list[tuple[str, Tensor]] = []
        self._walk()

    def named(self) -> list[tuple[str, Tensor]]:
        """(name, buffer), each once, in the module's order. The same list again if nothing has changed."""
        if self._is_other_tree():
            self._walk()
        buffers = _flattened(_values_of, self._filled)
        if not _are_same(buffers, self._buffers):
            self._buffers = buffers
            found: dict[int, tuple[str, Tensor]] = {}
            for name, buffer in zip(self._names, buffers, strict=True):
                if buffer is not None:
                    found.setdefault(id(buffer), (name, buffer))
            # By the first name of each alone, as torch's DDP does.
            self._named = [one for one in found.values() if one[0] not in self._ignored]
        return self._named

    def _walk(self) -> None:
        named = list(self._module.named_modules())
        self._owners = [owner for _, owner in named]
        self._dicts = self._read()
        self._lengths = list(map(len, self._dicts))
        # Most are empty, of which the length says all.
        self._parents = [owner._modules for owner in self._owners if len(owner._modules)]
        self._children = _flattened(_values_of, self._parents)
        self._filled = [owner._buffers for owner in self._owners if len(owner._buffers)]
        self._keys = _flattened(_keys_of, chain(self._parents, self._filled))
        self._names = [f"{prefix}.{key}" if prefix else key for prefix, owner in named for key in owner._buffers.keys()]  # noqa: SIM118 - scripted modules have no dict
        self._buffers, self._named = [], []

    def _read(self) -> list[Mapping[str, Any]]:
        return [*map(_children_of, self._owners), *map(_buffers_of, self._owners)]

    def _is_other_tree(self) -> bool:
        """Whether there are other modules than before, or other names of theirs or of buffers."""
        dicts = self._read()
        return not (
            _are_same(dicts, self._dicts)
            and list(map(len, dicts)) == self._lengths
            and _are_same(_flattened(_values_of, self._parents), self._children)
            and _flattened(_keys_of, chain(self._parents, self._filled)) == self._keys
        )


def _are_same(these: list[Any], those: list[Any]) -> bool:
    return len(these) == len(those) and all(map(operator.is_, these, those))


def _flattened(part: Callable[[Mapping[str, Any]], Iterable[Any]], dicts: Iterable[Mapping[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(part, dicts)))


_Entry = tuple[str, torch.dtype, torch.Size]

# Of each dtype's part of the message, in bytes: no dtype has larger elements.
_ALIGNMENT = 16


class BufferBroadcast:
    """
    Args:
        module: its buffers are dense, of one device that the group has a backend for, and alike on all ranks when this
            is made. Later they may change, see [Note: buffers that change].
    """

    def __init__(
        self, module: nn.Module, ignored: Sequence[str], group: BaguaProcessGroup, communicator: BaguaCommunicator
    ) -> None:
        self._group = group
        self._communicator = communicator
        self._places = ModuleBuffers(module, ignored)
        self._named: list[tuple[str, Tensor]] = []
        self._buffers: list[Tensor] = []
        # Where each of them lies. What lay there before is held by its portion, so that nothing else can come there.
        self._addresses: list[int] = []
        self._lengths: list[int] = []
        self._layout = self._agreed = _Layout.of(self._places.named())
        self._device = next((one.device for _, one in self._places.named()), torch.device("cpu"))
        self._message: _Message | None = None
        self._portions: list[_Portion] = []
        # The digest of the last source that nobody has looked at yet, and when it is there.
        self._unread: tuple[Tensor, torch.cuda.Event] | None = None

    @property
    def has_buffers(self) -> bool:
        """Whether the ranks have any. Where they have none, nothing is sent any more, as with torch's DDP."""
        return bool(self._agreed.entries)

    def named_buffers(self) -> list[tuple[str, Tensor]]:
        """(name, buffer), each once, as they are now."""
        return self._places.named()

    def run(self, source: int = 0) -> None:
        """Overwrite the buffers with those of group rank `source`. Autograd does not see it, as with torch's DDP: a
        forward pass whose backward pass is still to come may have used them.

        Raises:
            RuntimeError: the ranks have different buffers, named with the ranks; or communication failed: names the
                ranks that are gone, where that can be found out.
        """
        with torch.no_grad(), failures_named(self._group, "broadcasting buffers", in_order=True):
            is_captured = self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()
            if not is_captured:
                self._read_last(source)
            message = self._send(source)
            if message.header.device.type == "cpu":
                if not self._is_agreed(message.header, source):
                    message = self._send(source)
            elif not is_captured:  # into a CUDA graph, in which the host cannot read
                header = torch.empty(DIGEST_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
                header.copy_(message.header, non_blocking=True)
                event = torch.cuda.current_stream(message.header.device).record_event()
                self._unread = header, event
            if self._communicator.rank() != source:
                for portion in self._portions:
                    torch._foreach_copy_(portion.buffers, portion.parts)

    def _send(self, source: int) -> _Message:
        communicator = self._communicator
        message = self._look()
        if communicator.rank() == source:
            for portion in self._portions:
                torch._foreach_copy_(portion.parts, portion.buffers)
        dist.broadcast(message.memory, communicator.ranks[source], group=communicator.torch_group)
        return message

    def _read_last(self, source: int) -> None:
        if self._unread is not None:
            (header, event), self._unread = self._unread, None
            event.synchronize()
            self._is_agreed(header, source)

    def _is_agreed(self, header: Tensor, source: int) -> bool:
        """Whether the source of a message has what the ranks last agreed on. If not, all ranks agree anew.

        Raises:
            RuntimeError: the ranks have different buffers.
        """
        communicator = self._communicator
        if not torch.equal(header, self._agreed.replica.digest):
            self._look()
            self._layout.replica.check(communicator)
            self._agreed, self._message = self._layout, None
            return False
        if self._layout is not self._agreed:
            ranks = communicator.ranks[source], communicator.ranks[communicator.rank()]
            raise RuntimeError(self._agreed.replica.difference(self._layout.replica, ranks))
        return True

    def _look(self) -> _Message:
        """Make message and portions anew if the buffers, or the memory they lie in, are others than before."""
        named = self._places.named()
        if (
            self._message is not None
            and named is self._named
            and list(map(Tensor.numel, self._buffers)) == self._lengths
            and list(map(Tensor.data_ptr, self._buffers)) == self._addresses
        ):
            return self._message
        buffers = [buffer for _, buffer in named]
        for name, buffer in named:
            problem = why_unsendable(buffer) or (
                "it is expanded; call contiguous()" if repeats_elements(buffer) else None
            )
            if problem is not None:
                raise ValueError(f"buffer {name!r} cannot be broadcast: {problem}")
        entries = _entries_of(named)
        known = (one for one in (self._agreed, self._layout) if one.entries == entries)
        self._layout = next(known, None) or _Layout.of(named)
        device = buffers[0].device if buffers else self._device
        with torch.inference_mode(False):  # what is made here is used in later passes
            if self._message is None or device != self._device:
                self._message = _Message(self._agreed, device)
            self._device = device
            self._message.header.copy_(self._layout.replica.digest)
            self._portions = self._message.portions_of(named)
        self._named, self._buffers = named, buffers
        self._lengths, self._addresses = list(map(Tensor.numel, buffers)), list(map(Tensor.data_ptr, buffers))
        return self._message


@dataclass(frozen=True)
class _Layout:
    """Which buffers there are.

    Attributes:
        entries: (name, dtype, shape) of each.
        replica: the same for comparisons with other ranks, which takes longer to make.
    """

    entries: list[_Entry]
    replica: Replica

    @classmethod
    def of(cls, named: Sequence[tuple[str, Tensor]]) -> _Layout:
        return cls(_entries_of(named), Replica(named, "buffers"))


def _entries_of(named: Sequence[tuple[str, Tensor]]) -> list[_Entry]:
    return [(name, buffer.dtype, buffer.shape) for name, buffer in named]


class _Message:
    """Memory for the buffers of a layout.

    Attributes:
        memory: bytes: not every backend knows every dtype, and one message is cheaper than one for each.
        header: of these, those that say which buffers the source has.
    """

    def __init__(self, layout: _Layout, device: torch.device) -> None:
        by_dtype: dict[torch.dtype, list[tuple[str, torch.Size]]] = {}
        for name, dtype, shape in layout.entries:
            if shape.numel():
                by_dtype.setdefault(dtype, []).append((name, shape))
        sizes = {dtype: sum(shape.numel() for _, shape in named) for dtype, named in by_dtype.items()}
        lengths = [-(-size * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT for dtype, size in sizes.items()]
        self.memory = torch.empty(DIGEST_BYTES + sum(lengths), dtype=torch.uint8, device=device)
        self.header, *pieces = torch.split(self.memory, [DIGEST_BYTES, *lengths])
        self._parts: dict[tuple[str, torch.dtype, torch.Size], Tensor] = {}
        for piece, (dtype, named) in zip(pieces, by_dtype.items(), strict=True):
            flat = piece.view(dtype)[: sizes[dtype]]
            for part, (name, shape) in zip(
                torch.split(flat, [shape.numel() for _, shape in named]), named, strict=True
            ):
                self._parts[name, dtype, shape] = part.view(shape)

    def portions_of(self, named: Sequence[tuple[str, Tensor]]) -> list[_Portion]:
        """Of each dtype, the buffers that are in the message."""
        portions: dict[torch.dtype, _Portion] = {}
        for name, buffer in named:
            part = self._parts.get((name, buffer.dtype, buffer.shape))
            if part is not None:
                portions.setdefault(buffer.dtype, _Portion()).add(buffer, part)
        return list(portions.values())


class _Portion:
    """Buffers of one dtype, and a view of the message's memory for each."""

    def __init__(self) -> None:
        self.buffers: list[Tensor] = []
        self.parts: list[Tensor] = []

    def add(self, buffer: Tensor, part: Tensor) -> None:
        # The same memory, but a version of its own, so that autograd does not see that it is written.
        self.buffers.append(buffer.data)
        self.parts.append(part)
