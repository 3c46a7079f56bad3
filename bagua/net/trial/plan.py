"""What a trial measures, as the command tells every rank of it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

SIZES = (64 << 10, 1 << 20, 64 << 20)
# Starting Python, torch and NCCL on a loaded node takes most of it.
TURN_S = 180.0


@dataclass(frozen=True)
class Plan:
    """
    Attributes:
        rounds: of a turn without and a turn with the plugin.
        seconds: for which each size is measured in a turn.
        wait_s: until all ranks have met.
    """

    rounds: int
    seconds: float
    wait_s: float

    def as_argument(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of_argument(cls, text: str) -> Plan:
        return cls(**json.loads(text))

    def rounds_of(self, backend: str) -> int:
        """The plugin has no effect on gloo: one round shows that the nodes communicate."""
        return self.rounds if backend == "nccl" else 1

    @property
    def limit_s(self) -> float:
        """After which even the slowest healthy trial has ended, from when its ranks run."""
        return 2 * self.wait_s + 2 * self.rounds * TURN_S
