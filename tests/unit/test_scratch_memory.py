"""Scratch memory: what pieces are, how long they are valid, and what is kept."""

from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch, which is what trains")
import torch
from torch import Tensor

from bagua.engine.comm_thread import join_thread
from bagua.kernels import scratch_memory
from bagua.kernels.scratch_memory import ScratchMemory, keep_scratch, scratch, scratch_like

CPU = torch.device("cpu")
DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.complex128)


def _span(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def _are_apart(pieces: list[Tensor]) -> bool:
    spans = sorted(_span(piece) for piece in pieces)
    return all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))


class TestPieces:
    def test_pieces_of_any_dtype_do_not_overlap_and_begin_at_cache_lines(self) -> None:
        memory = ScratchMemory()
        for _ in range(3):
            pieces = [memory.piece((3, 7), dtype) for dtype in DTYPES]
            for piece, dtype in zip(pieces, DTYPES, strict=True):
                assert (tuple(piece.shape), piece.dtype, piece.is_contiguous()) == ((3, 7), dtype, True)
                assert piece.data_ptr() % 64 == 0
            assert _are_apart(pieces)
            memory.clear()

    def test_after_the_first_round_pieces_come_from_the_block(self) -> None:
        memory = ScratchMemory()
        assert memory.kept_bytes == 0
        memory.piece((100,), torch.float32)
        memory.piece((1,), torch.uint8)
        memory.clear()
        assert memory.kept_bytes == 448 + 64
        addresses = set()
        for _ in range(2):
            addresses.add((memory.piece((100,), torch.float32).data_ptr(), memory.piece((1,), torch.uint8).data_ptr()))
            memory.clear()
        assert len(addresses) == 1
        assert memory.kept_bytes == 448 + 64

    def test_a_piece_that_does_not_fit_has_memory_of_its_own_and_the_next_one_does_not(self) -> None:
        memory = ScratchMemory()
        memory.piece((64,), torch.uint8)
        memory.clear()
        small, large = memory.piece((64,), torch.uint8), memory.piece((4096,), torch.uint8)
        assert _are_apart([small, large])
        memory.clear()
        assert memory.kept_bytes == 64 + 4096

    def test_less_is_needed_and_the_block_stays(self) -> None:
        memory = ScratchMemory()
        memory.piece((4096,), torch.uint8)
        memory.clear()
        memory.piece((1,), torch.uint8)
        memory.clear()
        assert memory.kept_bytes == 4096

    def test_what_is_beyond_the_limit_is_not_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(scratch_memory, "KEPT_BYTES", 1024)
        memory = ScratchMemory()
        for _ in range(2):
            pieces = [memory.piece((size,), torch.uint8) for size in (512, 4096, 512, 64)]
            assert _are_apart(pieces)
            memory.clear()
            assert memory.kept_bytes == 1024

    def test_nothing_is_a_piece_too(self) -> None:
        memory = ScratchMemory()
        assert memory.piece((0,), torch.float32).numel() == 0
        memory.clear()
        assert memory.piece((2, 0), torch.float32).shape == (2, 0)


class TestThreads:
    def test_without_a_block_it_is_ordinary_memory(self) -> None:
        first, second = (scratch((8,), torch.float32, CPU) for _ in range(2))
        assert _are_apart([first, second])

    def test_a_thread_keeps_a_block_of_its_own(self) -> None:
        addresses: dict[str, set[int]] = {}
        together = threading.Barrier(2, timeout=20)

        def work(name: str) -> None:
            memory = keep_scratch()
            scratch((8,), torch.float32, CPU)
            memory.clear()
            addresses[name] = {scratch((8,), torch.float32, CPU).data_ptr()}
            memory.clear()
            addresses[name].add(scratch_like(torch.ones(8)).data_ptr())
            together.wait()

        threads = [threading.Thread(target=work, args=(name,)) for name in ("one", "other")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert len(addresses["one"]) == len(addresses["other"]) == 1
        assert addresses["one"] != addresses["other"]

    def test_other_devices_get_ordinary_memory(self) -> None:
        seen: list[Any] = []

        def work() -> None:
            memory = keep_scratch()
            piece = scratch((8,), torch.float32, torch.device("meta"))
            memory.clear()
            seen.extend([piece.device.type, memory.kept_bytes])

        thread = threading.Thread(target=work)
        thread.start()
        thread.join(20)
        assert seen == ["meta", 0]

    def test_scratch_like(self) -> None:
        like = scratch_like(torch.ones(2, 3, dtype=torch.bfloat16), torch.float32)
        assert (like.shape, like.dtype) == ((2, 3), torch.float32)
        assert scratch_like(torch.ones(2, dtype=torch.bfloat16)).dtype == torch.bfloat16

    def test_jobs_of_a_communication_thread_have_the_same_memory_one_after_the_other(self) -> None:
        class TorchGroup:
            pass

        thread = join_thread(SimpleNamespace(torch_group=TorchGroup()))  # type: ignore[arg-type]
        try:
            addresses = [
                thread.submit(lambda: scratch((1000,), torch.float32, CPU).data_ptr()).result(20) for _ in range(4)
            ]
        finally:
            thread.leave()
        assert len(set(addresses[1:])) == 1
