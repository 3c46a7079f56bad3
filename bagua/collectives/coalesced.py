"""Collectives of many tensors, in few messages. Called as the collectives are, with as many tensors of the same shapes
in the same order on every rank; runs on the caller's thread.

Tensors of one dtype and device travel together, in flat buffers of at most 64 MiB, so that the copies stay small beside
the model. They need not be contiguous.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from bagua.collectives import byte_transport, reduction
from bagua.collectives.arguments import check_op, check_rank, check_tensor, repeats_elements, resolve
from bagua.collectives.communicator import BaguaCommunicator
from bagua.collectives.reduce_op import ReduceOp

FLAT_BYTES = 64 << 20


def broadcast_coalesced(tensors: Iterable[torch.Tensor], src: int = 0, comm: BaguaCommunicator | None = None) -> None:
    """Every tensor becomes that of rank `src`."""
    if member := resolve(comm, "broadcast_coalesced"):
        source = check_rank("broadcast_coalesced", "src", src, member)
        for run in _runs(_checked("broadcast_coalesced", tensors, member)):
            together = _flattened(run)
            byte_transport.broadcast(member, together, source)
            if member.rank() != source:
                _write_back(together, run)


def allreduce_coalesced_inplace(
    tensors: Iterable[torch.Tensor], op: ReduceOp = ReduceOp.SUM, comm: BaguaCommunicator | None = None
) -> None:
    """Every tensor becomes the reduction of those of all ranks."""
    if member := resolve(comm, "allreduce_coalesced_inplace"):
        given = _checked("allreduce_coalesced_inplace", tensors, member)
        operation = check_op("allreduce_coalesced_inplace", op)
        # All of them before the first is sent: what a later one raises must not leave half of the work done.
        planned = [(run, reduction.plan(member, run[0], operation)) for run in _runs(given)]
        for run, plan in planned:
            together = _flattened(run)
            reduction.all_reduce(member, together, plan)
            _write_back(together, run)


def _checked(what: str, tensors: Iterable[torch.Tensor], comm: BaguaCommunicator) -> list[torch.Tensor]:
    # As a list: an iterator, such as `model.parameters()`, can be gone through only once.
    if isinstance(tensors, torch.Tensor):
        raise TypeError(f"{what}: tensors is one tensor of shape {tuple(tensors.shape)}; give a list of them: [tensor]")
    given = list(tensors)
    for number, tensor in enumerate(given):
        check_tensor(what, comm, f"tensors[{number}]", tensor)
        # On every rank, and before anything is sent: only those that write would notice, when the others have gone on.
        if repeats_elements(tensor):
            raise ValueError(
                f"{what}: tensors[{number}] is expanded (shape {tuple(tensor.shape)}, strides {tensor.stride()}), so"
                f" that several of its elements are one in memory; give tensors[{number}].contiguous()"
            )
    return given


def _runs(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Tensors of one dtype and device, in their order, of at most FLAT_BYTES together unless one alone is larger."""
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    for kind in kinds.values():
        run: list[torch.Tensor] = []
        size = 0
        for tensor in kind:
            if run and size + tensor.nbytes > FLAT_BYTES:
                yield run
                run, size = [], 0
            run.append(tensor)
            size += tensor.nbytes
        yield run


def _flattened(run: list[torch.Tensor]) -> torch.Tensor:
    """A copy of all in one, or the only one itself if it is contiguous."""
    if len(run) == 1 and run[0].is_contiguous():
        return byte_transport.flat(run[0])
    return torch.cat([tensor.reshape(-1) for tensor in run])


def _write_back(together: torch.Tensor, run: list[torch.Tensor]) -> None:
    if together.data_ptr() == run[0].data_ptr():
        return
    for tensor, values in zip(run, torch.split(together, [tensor.numel() for tensor in run]), strict=True):
        tensor.copy_(values.view(tensor.shape))
