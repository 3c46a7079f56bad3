"""Several ranks on one GPU: who has which, and what NCCL is told."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from bagua.net.bench.gpu_sharing import GpuSharing, gpu_name, mps_is_running, sharing_of

NO_MPS = {"CUDA_MPS_PIPE_DIRECTORY": "/nonexistent"}


def test_more_ranks_than_gpus_share_them() -> None:
    assert sharing_of(2, 2, NO_MPS) is None
    assert sharing_of(1, 8, NO_MPS) is None
    assert sharing_of(4, 1, NO_MPS) == GpuSharing(gpus=1, through_mps=False)
    assert sharing_of(3, 2, NO_MPS) == GpuSharing(gpus=2, through_mps=False)
    with pytest.raises(ValueError, match="2 ranks cannot share GPUs where there are none; look at nvidia-smi"):
        sharing_of(2, 0, NO_MPS)


def test_nccl_takes_each_rank_for_a_host_of_its_own() -> None:
    sharing = GpuSharing(1, through_mps=True)
    assert len({sharing.environment(rank)["NCCL_HOSTID"] for rank in range(4)}) == 4


def test_mps_runs_if_its_process_does(tmp_path: Path) -> None:
    """A daemon that is gone has left its file, and it writes no newline."""
    environment = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}
    assert not mps_is_running(environment)
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    for content, runs in (
        (os.getpid(), True),
        (gone.pid, False),
        ("", False),
        ("no number", False),
        ("../self", False),
    ):
        (tmp_path / "nvidia-cuda-mps-control.pid").write_text(str(content))
        assert mps_is_running(environment) is runs, content


def test_gpus_are_those_that_we_see() -> None:
    assert gpu_name(1, {}) == "1"
    assert gpu_name(1, {"CUDA_VISIBLE_DEVICES": "3, GPU-5"}) == "GPU-5"
