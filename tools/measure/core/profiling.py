"""A few steps under torch.profiler, as a Chrome trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from measure.core.turn import Turn


def trace_steps(turn: Turn, device: torch.device, *, steps: int, warmup: int, path: Path | None) -> None:
    """All ranks are traced, so that none waits for the one that is; a rank without a path writes no trace."""
    turn.train(max(1, warmup))
    # What the profiler loads when it is first used would be part of the first step.
    with profiler_of(device):
        turn.train(1)
    with profiler_of(device) as profiler:
        turn.train(steps)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    if path is not None:
        profiler.export_chrome_trace(str(path))


def profiler_of(device: torch.device) -> profile:
    """Of all threads, and of the GPU where there is one."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    return profile(activities=activities, experimental_config=_every_thread())


def _every_thread() -> Any:
    """By itself the profiler sees the threads of the training only, and not one that an algorithm communicates in."""
    from torch._C._profiler import _ExperimentalConfig

    try:
        return _ExperimentalConfig(profile_all_threads=True)
    except TypeError:  # torch 2.5 and 2.6: on a CPU, such an algorithm then seems to communicate nothing
        return None
