"""Several ranks on one GPU, for those who have fewer GPUs than they want ranks: to try, to test, to look at traffic.

NCCL refuses a GPU to two ranks of one host. It takes ranks for neighbours whose host ids agree, so each gets an id of
its own, and NCCL carries all traffic between them over TCP, as between hosts that have a GPU each. What they compute
still has one GPU for all. Without NVIDIA's Multi-Process Service (MPS) they have it in turns of milliseconds, and a
kernel of NCCL that waits for another rank may wait through the turns of all others.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_PIPE_FOLDER = "CUDA_MPS_PIPE_DIRECTORY"
_DEFAULT_PIPE_FOLDER = "/tmp/nvidia-mps"
_PID_FILE = "nvidia-cuda-mps-control.pid"


@dataclass(frozen=True)
class GpuSharing:
    """More ranks on this host than GPUs: rank k has GPU k modulo their number."""

    gpus: int
    through_mps: bool

    def environment(self, rank: int) -> dict[str, str]:
        """What a rank needs beside what all ranks have."""
        return {"NCCL_HOSTID": f"shared-gpu-rank-{rank}"}

    def __str__(self) -> str:
        what = "1 GPU" if self.gpus == 1 else f"{self.gpus} GPUs"
        return f"{what} shared {'through MPS' if self.through_mps else 'in turns, without MPS'}"

    @property
    def note(self) -> str:
        """What a reader of the figures has to know."""
        text = f"{self}: ranks of one GPU slow down each other's kernels"
        if not self.through_mps:
            text += ", and wait for each other's turns; for figures about the network start nvidia-cuda-mps-control -d"
        return text


def sharing_of(ranks: int, gpus: int, environment: Mapping[str, str] = os.environ) -> GpuSharing | None:
    """None where each rank has a GPU. Raises ValueError without any GPU."""
    if gpus < 1:
        raise ValueError(f"{ranks} ranks cannot share GPUs where there are none; look at nvidia-smi")
    return GpuSharing(gpus, mps_is_running(environment)) if ranks > gpus else None


def mps_is_running(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether CUDA programs started with this environment would find a control daemon of MPS."""
    pid_file = Path(environment.get(_PIPE_FOLDER, _DEFAULT_PIPE_FOLDER), _PID_FILE)
    try:
        pid = int(pid_file.read_text(encoding="ascii").strip("\0 \n"))
    except (OSError, ValueError):
        return False
    return Path("/proc", str(pid)).exists()


def gpu_name(number: int, environment: Mapping[str, str] = os.environ) -> str:
    """What CUDA_VISIBLE_DEVICES has to be for a process that is to see this one alone of the GPUs that we see."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    return str(number) if visible is None else visible.split(",")[number].strip()
