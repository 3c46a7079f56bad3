"""The tests of the training core again, with a GPU for each rank and NCCL instead of gloo. Those that need more ranks
than there are GPUs say so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

DEADLINE_S = 280
REPOSITORY = Path(__file__).resolve().parents[2]
FILES = sorted(
    f"test_{topic}.py"
    for topic in (
        *("gradient_allreduce", "bagua_module", "find_unused", "no_sync", "join", "torch_features"),
        *("collectives", "collectives_inplace", "coalesced", "state_broadcast", "process_groups", "buckets"),
        *("bytegrad", "chunk_exchange", "comm_hooks"),
        *("decentralized", "decentralized_rounds", "decentralized_resume", "low_precision_decentralized"),
        *("qadam", "qadam_optimizer", "qadam_features", "algorithms_compose", "algorithms_resume"),
        *("async_model_average", "async_schedules"),
    )
)


@pytest.mark.gpu
@pytest.mark.parametrize("file", FILES)
def test_on_gpus(file: str) -> None:
    environment = {**os.environ, "BAGUA_TEST_DEVICE": "cuda"}
    # Not as a plugin of this run: its own process has its own rank server. pytest-benchmark, where it is installed,
    # warns, and warnings are errors here.
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "-p", "no:benchmark"]
    done = subprocess.run(
        [
            *command,
            f"--rootdir={REPOSITORY}",
            f"--config-file={REPOSITORY / 'pyproject.toml'}",
            f"tests/distributed/{file}",
        ],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-1500:]}"
    assert " passed" in done.stdout.splitlines()[-1]
