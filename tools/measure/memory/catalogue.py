"""What is measured, and what docs/reference/algorithms states of it: known without loading torch.

All figures are for float32 and ranks that are no nodes (`hierarchical=False`). What an algorithm *keeps* is there
between the steps, on top of parameters, gradients and the optimizer's state. Its *scratch* is there only while it
works; but on CPUs the communication thread keeps that of communication, up to THREAD_KEEPS_BYTES. What is stated of
scratch are the algorithm's tensors; gloo's buffers are neither stated nor, where they would matter, small.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

SGD, ADAM, QADAM = "sgd", "adam", "qadam"
# With which QAdam begins to compress; it is over when steps are measured.
QADAM_WARMUP_STEPS = 2
# bagua.kernels.scratch_memory.KEPT_BYTES and bagua.comm_ops.all_reduce.WINDOW_BYTES, which need torch.
THREAD_KEEPS_BYTES = 64 << 20
SUMMED_AT_ONCE_BYTES = 32 << 20
_ELEMENT_BYTES = 4


@dataclass(frozen=True)
class Stated:
    """
    kept, kept_of_bucket: bytes per parameter, and per element of the largest bucket.
    scratch: of the optimizer, bytes per parameter; on CPUs it steps a few parameters at a time, and needs next to none.
    exchanged: scratch of communication, bytes per element of the largest bucket with so many ranks on such a device.
    sums: buckets are summed over the ranks, at least at first, which on CPUs takes others' versions of the own part.
    """

    kept: float = 0.0
    kept_of_bucket: float = 0.0
    scratch: float = 0.0
    exchanged: Callable[[int, str], float] = lambda _ranks, _device: 0.0
    sums: bool = False

    def kept_bytes(self, parameters: int, largest_bucket: int, ranks: int, device: str) -> float:
        own = self.kept * parameters + self.kept_of_bucket * largest_bucket
        return own + self._thread_bytes(largest_bucket, ranks, device)

    def peak_bytes(self, parameters: int, largest_bucket: int, ranks: int, device: str) -> float:
        communication = self._communication_bytes(largest_bucket, ranks, device)
        beyond = communication - self._thread_bytes(largest_bucket, ranks, device)
        # The optimizer steps when communication is over.
        stepping = 0.0 if device == "cpu" else self.scratch * parameters
        return self.kept_bytes(parameters, largest_bucket, ranks, device) + max(stepping, beyond)

    def _communication_bytes(self, largest_bucket: int, ranks: int, device: str) -> float:
        exchanged = self.exchanged(ranks, device) * largest_bucket
        if not self.sums or device != "cpu":
            return exchanged
        return max(exchanged, (1 - 1 / ranks) * min(_ELEMENT_BYTES * largest_bucket, SUMMED_AT_ONCE_BYTES))

    def _thread_bytes(self, largest_bucket: int, ranks: int, device: str) -> float:
        if device != "cpu":
            return 0.0
        return min(self._communication_bytes(largest_bucket, ranks, device), THREAD_KEEPS_BYTES)


@dataclass(frozen=True)
class Case:
    """optimizer: of the plain training that it is compared with, too (Adam for QAdam)."""

    algorithm: str
    stated: Stated
    options: Mapping[str, object] = field(default_factory=dict)
    optimizer: str = SGD


FLAT = {"hierarchical": False}
# Of an element that is compressed.
BYTE = 1 + 8 / 1024


def _chunks(ranks: int, _device: str) -> float:
    """What is sent, what is received, and the sum of the own chunk."""
    return (2 + 1 / ranks) * BYTE


def _differences(ranks: int, device: str) -> float:
    """The difference in float32, on GPUs with that of a neighbour, and then the messages: the own one and those of the
    neighbours."""
    messages = (1 + min(2, ranks - 1)) * BYTE
    return 4 + messages if device == "cpu" else 4 + max(4, messages)


CASES: dict[str, Case] = {
    # Gradients lie in the buckets, where they are summed.
    "gradient_allreduce": Case("gradient_allreduce", Stated(sums=True)),
    "bytegrad": Case("bytegrad", Stated(exchanged=_chunks), FLAT),
    # Momenta have buckets of their own, which are sent as those of bytegrad are, and summed during warm-up. On GPUs the
    # step has the square roots of all variances at once.
    "qadam": Case("qadam", Stated(kept=4, scratch=4, exchanged=_chunks, sums=True), FLAT, QADAM),
    "decentralized": Case("decentralized", Stated(kept=4, sums=True), FLAT),
    "decentralized-shift_one": Case(
        "decentralized",
        Stated(kept=4, exchanged=lambda _ranks, _device: 4),
        {**FLAT, "peer_selection_mode": "shift_one"},
    ),
    # W, L and R.
    "low_precision_decentralized": Case("low_precision_decentralized", Stated(kept=12, exchanged=_differences), FLAT),
    # A contribution and a difference, and one mean for all buckets.
    "async": Case("async", Stated(kept=8, kept_of_bucket=4), {"sync_interval_ms": 1}),
}
