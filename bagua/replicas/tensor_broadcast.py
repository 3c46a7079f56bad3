"""Broadcast of whatever tensors a model or an optimizer has, from rank 0 of a communicator. Functions; any thread."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from bagua.collectives import coalesced
from bagua.collectives.arguments import repeats_elements
from bagua.collectives.communicator import BaguaCommunicator
from bagua.job import torch_internals


def why_unsendable(tensor: torch.Tensor) -> str | None:
    """What is wrong with a tensor that cannot be broadcast, and the remedy."""
    if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
        return "it is not initialized yet; run one forward pass of the lazy module first"
    if tensor.layout is not torch.strided:
        return f"its layout is {tensor.layout}; only dense tensors can; call to_dense()"
    if tensor.device.type == "meta":
        return "it is on the meta device and has no values; materialize it first"
    return None


@torch.no_grad()
def broadcast_tensors(tensors: Iterable[torch.Tensor], communicator: BaguaCommunicator) -> None:
    """
    Overwrites the tensors in place with those of rank 0. No autograd; no tensor shares memory with a buffer afterwards.

    Args:
        tensors: the same shapes, dtypes and kinds of device in the same order on every rank. All must be sendable;
            they need not be contiguous, nor on a device that the group has a backend for. Expanded ones may only be
            rank 0's.
    """
    if communicator.nranks() == 1:
        return
    served = torch_internals.device_types(communicator.torch_group)
    direct: list[torch.Tensor] = []
    detoured: list[torch.Tensor] = []
    for tensor in tensors:
        if communicator.rank() == 0 and repeats_elements(tensor):
            tensor = tensor.detach().contiguous()  # it is only read here
        pieces = detoured if tensor.device.type not in served else direct
        pieces.extend(_pieces(tensor.detach(), coalesced.FLAT_BYTES))
    coalesced.broadcast_coalesced(direct, 0, communicator)
    # A group of NCCL alone has no way for CPU tensors but through the GPU.
    for portion in _portions(detoured, coalesced.FLAT_BYTES):
        copies = [piece.to(communicator.device, copy=True) for piece in portion]
        coalesced.broadcast_coalesced(copies, 0, communicator)
        if communicator.rank() != 0:
            for piece, values in zip(portion, copies, strict=True):
                piece.copy_(values)


def _pieces(tensor: torch.Tensor, limit_bytes: int) -> Iterator[torch.Tensor]:
    """Views of at most `limit_bytes`, cut by shape alone, so that all ranks cut alike. That bounds the copies that are
    made of tensors that are not contiguous; pieces of contiguous ones are contiguous."""
    if tensor.nbytes <= limit_bytes or tensor.numel() == 1:
        yield tensor
        return
    dimension = next(index for index, length in enumerate(tensor.shape) if length > 1)
    length = max(1, limit_bytes // (tensor.nbytes // tensor.shape[dimension]))
    for part in torch.split(tensor, length, dimension):
        yield from _pieces(part, limit_bytes)


def _portions(pieces: Sequence[torch.Tensor], limit_bytes: int) -> Iterator[list[torch.Tensor]]:
    portion: list[torch.Tensor] = []
    size = 0
    for piece in pieces:
        if portion and size + piece.nbytes > limit_bytes:
            yield portion
            portion, size = [], 0
        portion.append(piece)
        size += piece.nbytes
    if portion:
        yield portion
