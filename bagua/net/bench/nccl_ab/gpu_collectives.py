"""The collectives of the GPU comparison: buffers, launches, and verification against a closed form.

Runs inside a rank's process, on its main thread; owns the device buffers. The only module of the benchmark that calls
torch.distributed, so that `bagua.net` stays importable without torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from bagua.net.bench.machine import available_bytes
from bagua.net.bench.nccl_ab.session import SPLIT, buffer_bytes

if TYPE_CHECKING:
    from torch import Tensor

# int64 work space of the verification: 4 Mi elements are 32 MiB a temporary, whatever the size verified.
_VERIFY_ELEMENTS = 1 << 22

# An odd constant (2^64 / golden ratio, as a signed number) spreads neighbouring positions over all 64 bits.
_SPREAD = -7046029254386353131
_RANK_STEP = 1000003
_SALT_STEP = 15485863

# No pattern value is negative: what the collective failed to write is found.
_UNWRITTEN = -1.0


def pattern_modulus(ranks: int) -> int:
    """Values are integers below this, so that the sum over all ranks stays exact in bfloat16 (8 bits) in any order."""
    if not 1 <= ranks <= 128:
        raise ValueError(f"{ranks} ranks: sums stay exact in bfloat16 for 1 to 128 ranks; verify with fewer ranks")
    return 256 // ranks


def pattern(rank: int, begin: int, count: int, salt: int, modulus: int, device: torch.device) -> Tensor:
    """Elements [begin, begin + count) of what `rank` sends: differs by rank, by position and by verification."""
    position = torch.arange(begin, begin + count, dtype=torch.int64, device=device)
    mixed = (position + rank * _RANK_STEP + salt * _SALT_STEP) * _SPREAD
    # The high bits are the well mixed ones; int64's shift keeps the sign, so it is masked away.
    return ((mixed >> 40) & 0x7FFFFF) % modulus


@dataclass(frozen=True)
class Verification:
    wrong_elements: int
    first_wrong: int | None


class CollectiveRunner:
    """Launches and verifies. Its buffers live within `holding` only: every backend has a process on the same GPU, and
    eleven times the largest size need not fit there."""

    def __init__(self, rank: int, ranks: int, device: torch.device, dtype: torch.dtype) -> None:
        self._rank = rank
        self._ranks = ranks
        self._device = device
        self._dtype = dtype
        self._modulus = pattern_modulus(ranks)
        self._element_bytes = dtype.itemsize
        self._send = self._receive = torch.empty(0, dtype=dtype, device=device)

    @contextlib.contextmanager
    def holding(self, collective: str, size_bytes: int) -> Iterator[None]:
        """Buffers for this operation, zeros: repeated sums in place neither overflow nor slow down over subnormal
        numbers. The caller has waited for all operations when it leaves."""
        elements, rest = divmod(size_bytes, self._element_bytes)
        if rest or elements < 1:
            raise ValueError(f"{collective} of {size_bytes} B has no whole elements of {self._element_bytes} B")
        if collective in SPLIT and elements % self._ranks:
            raise ValueError(f"{collective} of {elements} elements cannot be split over {self._ranks} ranks")
        try:
            self._send, self._receive = (
                torch.zeros(size // self._element_bytes, dtype=self._dtype, device=self._device)
                for size in buffer_bytes(collective, size_bytes, self._ranks)
            )
            yield
        finally:
            self._send = self._receive = torch.empty(0, dtype=self._dtype, device=self._device)
            if self._device.type == "cuda":
                # Else torch would keep the memory for this process.
                torch.cuda.empty_cache()

    def free_bytes(self) -> int:
        """Memory that one rank can have now. On CPUs all ranks share the host's."""
        if self._device.type == "cuda":
            return int(torch.cuda.mem_get_info(self._device)[0])
        return (available_bytes(Path("/proc/meminfo").read_text(encoding="ascii")) or 0) // self._ranks

    def launch(self, collective: str) -> Callable[[], object]:
        """A function that starts the operation once, within `holding` it; on a GPU it returns before the operation
        ended."""
        send, receive = self._send, self._receive
        # torch 2.13 renamed the two; the old names warn there.
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        operations: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: dist.all_reduce(receive),
            "broadcast": lambda: dist.broadcast(receive, 0),
            "all_gather": lambda: all_gather(receive, send),
            "reduce_scatter": lambda: reduce_scatter(receive, send),
            "all_to_all": lambda: dist.all_to_all_single(receive, send),
            "send_recv": lambda: self._ring_shift(send, receive),
        }
        return operations[collective]

    def _ring_shift(self, outgoing: Tensor, incoming: Tensor) -> None:
        """Every rank sends to the next and receives from the previous, as nccl-tests' sendrecv does."""
        to_rank, from_rank = (self._rank + 1) % self._ranks, (self._rank - 1) % self._ranks
        operations = [dist.P2POp(dist.isend, outgoing, to_rank), dist.P2POp(dist.irecv, incoming, from_rank)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    def verify(self, collective: str, size_bytes: int, salt: int) -> Verification:
        """One operation on fresh data, within `holding` it; every element is compared on the device with what it has to
        be."""
        self._receive.fill_(_UNWRITTEN)
        if collective != "broadcast" or self._rank == 0:
            self._fill(self._receive if collective in ("all_reduce", "broadcast") else self._send, salt)
        self.launch(collective)()
        elements = size_bytes // self._element_bytes
        wrong, first = 0, None
        for begin, count, sources, source_begin in self._expected_segments(collective, elements):
            segment_wrong, segment_first = self._compare(begin, count, sources, source_begin, salt)
            wrong += segment_wrong
            first = segment_first if first is None else first
        return Verification(wrong, first)

    def _expected_segments(self, collective: str, elements: int) -> list[tuple[int, int, list[int], int]]:
        """(first received element, count, ranks whose elements are summed, first of their elements)."""
        everyone, part = list(range(self._ranks)), elements // self._ranks
        if collective == "all_reduce":
            return [(0, elements, everyone, 0)]
        if collective == "broadcast":
            return [(0, elements, [0], 0)]
        if collective == "all_gather":
            return [(source * part, part, [source], 0) for source in everyone]
        if collective == "reduce_scatter":
            return [(0, part, everyone, self._rank * part)]
        if collective == "all_to_all":
            return [(source * part, part, [source], self._rank * part) for source in everyone]
        return [(0, elements, [(self._rank - 1) % self._ranks], 0)]

    def _fill(self, buffer: Tensor, salt: int) -> None:
        for begin in range(0, buffer.numel(), _VERIFY_ELEMENTS):
            part = buffer[begin : begin + _VERIFY_ELEMENTS]
            part.copy_(pattern(self._rank, begin, part.numel(), salt, self._modulus, self._device))

    def _compare(
        self, begin: int, elements: int, sources: list[int], source_begin: int, salt: int
    ) -> tuple[int, int | None]:
        wrong, first = 0, None
        for offset in range(0, elements, _VERIFY_ELEMENTS):
            count = min(_VERIFY_ELEMENTS, elements - offset)
            expected = torch.zeros(count, dtype=torch.int64, device=self._device)
            for source in sources:
                expected += pattern(source, source_begin + offset, count, salt, self._modulus, self._device)
            received = self._receive[begin + offset : begin + offset + count]
            differs = received != expected.to(received.dtype)
            here = int(differs.sum().item())
            if here and first is None:
                first = begin + offset + int(differs.to(torch.uint8).argmax().item())
            wrong += here
        return wrong, first
