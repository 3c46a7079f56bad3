"""What a real NCCL job of the GPU tests came to; the fixture that runs one is in tests/gpu/conftest.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from bagua.net.bench.nccl_log import NetworkProof

RANKS = 2


@dataclass(frozen=True)
class Job:
    code: int
    output: str
    right: bool | None  # None: it ended before it had a result
    nccl: str | None
    proofs: list[NetworkProof] = field(default_factory=list)
    logs: str = ""

    @property
    def networks(self) -> set[str | None]:
        return {proof.network for proof in self.proofs}


RunJob = Callable[..., Job]
