"""What is measured, and what docs/algorithms states of it: known without loading torch.

All figures are for float32 and ranks that are no nodes (`hierarchical=False`). What an algorithm *keeps* is there
between the steps, beside parameters, gradients and the optimizer's state. Its *scratch* comes on top while it works and
is gone after that. What is stated of scratch are the algorithm's tensors; gloo's buffers are neither stated nor, where
they would matter, small.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

SGD, ADAM, QADAM = "sgd", "adam", "qadam"
# With which QAdam begins to compress; it is over when steps are measured.
QADAM_WARMUP_STEPS = 2


@dataclass(frozen=True)
class Stated:
    """Bytes per parameter, per element of the largest bucket, and the latter again but divided by the ranks."""

    kept: float = 0.0
    kept_of_bucket: float = 0.0
    scratch: float = 0.0
    scratch_of_bucket: float = 0.0
    scratch_over_ranks: float = 0.0

    def kept_bytes(self, parameters: int, largest_bucket: int) -> float:
        return self.kept * parameters + self.kept_of_bucket * largest_bucket

    def scratch_bytes(self, parameters: int, largest_bucket: int, ranks: int) -> float:
        return self.scratch * parameters + (self.scratch_of_bucket + self.scratch_over_ranks / ranks) * largest_bucket


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
CASES: dict[str, Case] = {
    # Gradients lie in the buckets, where they are summed.
    "gradient_allreduce": Case("gradient_allreduce", Stated()),
    # What is sent, what is received, and the own chunk; a byte per element, and eight per 1024 elements.
    "bytegrad": Case("bytegrad", Stated(scratch_of_bucket=2 * BYTE, scratch_over_ranks=BYTE), FLAT),
    # Momenta have buckets of their own. The step has the square roots of all variances at once.
    "qadam": Case("qadam", Stated(kept=4, scratch=4), FLAT, QADAM),
    "decentralized": Case("decentralized", Stated(kept=4), FLAT),
    "decentralized-shift_one": Case(
        "decentralized", Stated(kept=4, scratch=4), {**FLAT, "peer_selection_mode": "shift_one"}
    ),
    # W, L and R. The difference and the messages.
    "low_precision_decentralized": Case("low_precision_decentralized", Stated(kept=12, scratch_of_bucket=12), FLAT),
    # A contribution and a difference, and one mean for all buckets.
    "async": Case("async", Stated(kept=8, kept_of_bucket=4), {"sync_interval_ms": 1}),
}
