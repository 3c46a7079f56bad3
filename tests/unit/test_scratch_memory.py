"""Scratch memory: what pieces are, how long they are valid, and what is kept."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="needs PyTorch, which is what trains")
import torch
from torch import Tensor

from bagua.engine.comm_thread import join_thread
from bagua.kernels import scratch_memory
from bagua.kernels.scratch_memory import ScratchMemory, keep_scratch, scratch, scratch_like

CPU = torch.device("cpu")
DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.complex128)


def _are_apart(pieces: list[Tensor]) -> bool:
    spans = sorted((piece.data_ptr(), piece.data_ptr() + piece.nbytes) for piece in pieces)
    return all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))


def test_pieces_of_any_dtype_do_not_overlap_and_begin_at_cache_lines() -> None:
    memory = ScratchMemory()
    for _ in range(3):
        pieces = [memory.piece((3, 7), dtype) for dtype in DTYPES]
        for piece, dtype in zip(pieces, DTYPES, strict=True):
            assert (tuple(piece.shape), piece.dtype, piece.is_contiguous()) == ((3, 7), dtype, True)
            assert piece.data_ptr() % 64 == 0
        assert _are_apart(pieces)
        assert memory.piece((2, 0), torch.float32).shape == (2, 0)
        memory.clear()


def test_after_the_first_round_pieces_come_from_the_block() -> None:
    """It grows with what did not fit, and stays when less is needed."""
    memory = ScratchMemory()
    assert memory.kept_bytes == 0
    addresses = set()
    for number in range(3):
        pieces = [memory.piece((100,), torch.float32), memory.piece((1,), torch.uint8)]
        if number:
            addresses.add(tuple(piece.data_ptr() for piece in pieces))
        memory.clear()
        assert memory.kept_bytes == 448 + 64
    assert len(addresses) == 1
    assert _are_apart([memory.piece((64,), torch.uint8), memory.piece((4096,), torch.uint8)])
    for _ in range(2):
        memory.clear()
        assert memory.kept_bytes == 64 + 4096
        memory.piece((1,), torch.uint8)


def test_what_is_beyond_the_limit_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch_memory, "KEPT_BYTES", 1024)
    memory = ScratchMemory()
    for _ in range(2):
        assert _are_apart([memory.piece((size,), torch.uint8) for size in (512, 4096, 512, 64)])
        memory.clear()
        assert memory.kept_bytes == 1024


def test_a_thread_keeps_a_block_of_its_own() -> None:
    assert _are_apart([scratch((8,), torch.float32, CPU) for _ in range(2)]), "ordinary memory"
    together = threading.Barrier(2, timeout=20)

    def work(_: int) -> tuple[set[int], str, int]:
        memory = keep_scratch()
        scratch((8,), torch.float32, CPU)
        memory.clear()
        addresses = {scratch((8,), torch.float32, CPU).data_ptr()}
        memory.clear()
        addresses.add(scratch_like(torch.ones(8)).data_ptr())
        kept = memory.kept_bytes
        elsewhere = scratch((8,), torch.float32, torch.device("meta"))
        memory.clear()
        together.wait()
        return addresses, elsewhere.device.type, memory.kept_bytes - kept

    with ThreadPoolExecutor(2) as pool:
        (one, *others), (other, *_) = pool.map(work, range(2))
    assert len(one) == len(other) == 1
    assert one != other
    assert others == ["meta", 0]


def test_scratch_like() -> None:
    like = scratch_like(torch.ones(2, 3, dtype=torch.bfloat16), torch.float32)
    assert (like.shape, like.dtype) == ((2, 3), torch.float32)
    assert scratch_like(torch.ones(2, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_jobs_of_a_communication_thread_have_the_same_memory_one_after_the_other() -> None:
    class TorchGroup:
        pass

    thread = join_thread(SimpleNamespace(torch_group=TorchGroup()))  # type: ignore[arg-type]
    try:
        ask = lambda: scratch((1000,), torch.float32, CPU).data_ptr()  # noqa: E731
        addresses = [thread.submit(ask).result(20) for _ in range(4)]
    finally:
        thread.leave()
    assert len(set(addresses[1:])) == 1
