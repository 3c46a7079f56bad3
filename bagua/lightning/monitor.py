"""A callback that logs how long steps communicate."""

from __future__ import annotations

import functools
import math
from typing import Any

from bagua.lightning.packages import ForPackage, subclass_for


@functools.cache
def monitor_for(package: str) -> Any:
    """The class for one of Lightning's packages.

    Args:
        package: "lightning.pytorch" or "pytorch_lightning".

    Raises:
        ImportError: it is not installed.
    """
    return subclass_for(package, "CommunicationMonitor", Monitor, monitor_for, "callbacks", "Callback")


class Monitor(ForPackage):
    """Logs `bagua/step_ms`, `bagua/exposed_ms` (communication that a step waits for), `bagua/hidden_ms` (communication
    behind the backward pass) and `bagua/MiB` (of tensors in a step, before compression), those of rank 0; see
    `bagua_ddp.stats()`. With another strategy than Bagua's it does nothing.

    Args:
        every_n_steps: between two entries.
        prog_bar: show `bagua/exposed_ms` in the progress bar.

    Raises:
        ValueError: `every_n_steps` is below 1.
    """

    def __init__(self, every_n_steps: int = 50, prog_bar: bool = True) -> None:
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps={every_n_steps}: must be at least 1")
        self.every_n_steps, self.prog_bar = every_n_steps, prog_bar

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        engine = pl_module.__dict__.get("bagua_ddp")
        if engine is None or (trainer.global_step + 1) % self.every_n_steps:
            return
        stats = engine.stats()
        figures = {
            "bagua/step_ms": 1e3 * stats.step_s,
            "bagua/exposed_ms": 1e3 * stats.exposed_s,
            "bagua/hidden_ms": 1e3 * stats.hidden_s,
            "bagua/MiB": stats.nbytes / (1 << 20),
        }
        known = {name: value for name, value in figures.items() if not math.isnan(value)}
        for name, value in known.items():
            pl_module.log(name, value, prog_bar=self.prog_bar and name == "bagua/exposed_ms", rank_zero_only=True)
