"""Collectives of Python objects, by pickle. For settings and states of moderate size, between processes that trust each
other: unpickling runs code of the sender's choice. Called as the collectives are; runs on the caller's thread.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch

from bagua.collectives import byte_transport
from bagua.collectives.arguments import check_rank, resolve
from bagua.collectives.communicator import BaguaCommunicator
from bagua.job import torch_internals

_FAILED = -1  # instead of a size: the object could not be pickled. Without it the others would wait indefinitely.

# A pickle of settings and states has kilobytes. What a peer announces is allocated before it comes, so that a larger
# number, which is a mistake or a broken peer, could end this process for lack of memory.
MAX_OBJECT_BYTES = 1 << 30


def broadcast_object(obj: Any, src: int = 0, comm: BaguaCommunicator | None = None) -> Any:
    """
    Args:
        obj: what rank `src` of the communicator gives; that of the others is ignored.

    Returns:
        the object of rank `src`: itself there, a copy elsewhere. `obj` for processes that are no members.

    Raises:
        Exception: what pickling raises, on rank `src`; ValueError: its pickle is above MAX_OBJECT_BYTES.
        RuntimeError: rank `src` could not pickle its object; on the other ranks.
        ValueError: rank `src` announces a size that no object may have.
    """
    member = resolve(comm, "broadcast_object")
    if member is None:
        return obj
    source = check_rank("broadcast_object", "src", src, member)
    device = member.device
    is_source = member.rank() == source
    data, error = _pickled(obj) if is_source else (b"", None)
    size = torch.tensor([len(data) if error is None else _FAILED], device=device)
    byte_transport.broadcast(member, size, source)
    if error is not None:
        raise error
    if size.item() == _FAILED:
        raise RuntimeError(f"broadcast_object: rank {source} could not pickle its object; its error says why")
    length = _checked_size("broadcast_object", int(size.item()), source)
    payload = _tensor(data, device) if is_source else torch.empty(length, dtype=torch.uint8, device=device)
    byte_transport.broadcast(member, payload, source)
    return obj if is_source else _unpickled(payload)


def all_gather_object(obj: Any, comm: BaguaCommunicator | None = None) -> list[Any]:
    """
    Returns:
        the objects of all ranks in their order; this rank's is itself. Empty for processes that are no members.

    Raises:
        ValueError: the pickle is larger than MAX_OBJECT_BYTES, or a rank announces a size that no object may have. What
            pickling raises is raised on the ranks where it fails.
        RuntimeError: it failed on the ranks that the error names.
    """
    member = resolve(comm, "all_gather_object")
    if member is None:
        return []
    device = member.device
    data, error = _pickled(obj)
    sizes = torch.empty(member.nranks(), dtype=torch.int64, device=device)
    own_size = torch.tensor([len(data) if error is None else _FAILED], device=device)
    byte_transport.all_gather(member, own_size, sizes)
    if error is not None:
        raise error
    lengths = [int(size) for size in sizes.tolist()]
    failed = [rank for rank, length in enumerate(lengths) if length == _FAILED]
    if failed:
        raise RuntimeError(f"all_gather_object: ranks {failed} could not pickle their objects; their errors say why")
    for rank, length in enumerate(lengths):
        _checked_size("all_gather_object", length, rank)
    # Padded to the longest: one collective, and on the network no more than n times that.
    room = max(lengths)
    padded = torch.zeros(room, dtype=torch.uint8, device=device)
    padded[: len(data)] = _tensor(data, device)
    everything = torch.empty(member.nranks() * room, dtype=torch.uint8, device=device)
    byte_transport.all_gather(member, padded, everything)
    pieces = byte_transport.parts(everything, member.nranks())
    return [
        obj if rank == member.rank() else _unpickled(piece[:length])
        for rank, (piece, length) in enumerate(zip(pieces, lengths, strict=True))
    ]


def start_all_gather_bytes(data: torch.Tensor, comm: BaguaCommunicator) -> Callable[[], list[list[int]]]:
    """Starts an exchange that goes on in the background; with CUDA it is over on return.

    Args:
        data: uint8, on the CPU, as many elements on every rank.

    Returns:
        what waits, and gives the bytes of all ranks in their order.
    """
    device = comm.device
    if device.type == "cpu":
        everything = data.new_empty(comm.nranks() * data.numel())
        work = torch_internals.all_gather_flat(everything, data, group=comm.torch_group, async_op=True)

        def wait() -> list[list[int]]:
            assert work is not None
            work.wait()
            return everything.view(comm.nranks(), data.numel()).tolist()

        return wait
    own = data.to(device)
    gathered = own.new_empty(comm.nranks() * own.numel())
    byte_transport.all_gather(comm, own, gathered)
    rows: list[list[int]] = gathered.view(comm.nranks(), own.numel()).tolist()
    return lambda: rows


def _pickled(obj: Any) -> tuple[bytes, Exception | None]:
    try:
        data = pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        return b"", error
    if len(data) > MAX_OBJECT_BYTES:
        return b"", ValueError(
            f"The pickle of a {type(obj).__name__} has {len(data)} bytes; at most {MAX_OBJECT_BYTES} are sent.\n"
            "Send its tensors with broadcast or allgather, and only the rest as an object."
        )
    return data, None


def _checked_size(what: str, size: int, rank: int) -> int:
    # Of a pickle, as a rank of the communicator announces it.
    if not 0 <= size <= MAX_OBJECT_BYTES:
        raise ValueError(
            f"Rank {rank} announced a pickle of {size} bytes; between 0 and {MAX_OBJECT_BYTES} are accepted.\n"
            f"Operation: {what}; {rank} is a rank of the communicator.\n"
            "Check that all ranks run the same program and version, and call their collectives in the same order."
        )
    return size


def _tensor(data: bytes, device: torch.device) -> torch.Tensor:
    # A bytearray, because torch warns of memory that it must not write.
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def _unpickled(payload: torch.Tensor) -> Any:
    data = bytearray(payload.numel())
    torch.frombuffer(data, dtype=torch.uint8).copy_(payload)
    return pickle.loads(data)
