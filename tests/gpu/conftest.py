"""Real NCCL jobs of two ranks, on two GPUs of this host or on one, over loopback TCP, of the installed package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from support.gpu_job import RANKS, Job, RunJob
from support.ports import free_port

from bagua.net.bench.nccl_log import read_proof_file

DEADLINE_S = 280
_OWN = ("NCCL_", "BAGUA_NET_", "_BAGUA_NET_", "ENABLE_BAGUA_NET", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_")

# NCCL refuses a GPU to two ranks of one host.
_OWN_HOST = """
gpus=$(nvidia-smi --list-gpus | wc -l)
export CUDA_VISIBLE_DEVICES=$((LOCAL_RANK % gpus)) NCCL_HOSTID=rank-$RANK LOCAL_RANK=0 LOCAL_WORLD_SIZE=1
exec "$@"
"""


@pytest.fixture
def run_job(tmp_path: Path) -> RunJob:
    """torchrun of nccl_job.py, or another script, with the given variables on top of TCP over loopback, and what NCCL
    logged. Another script gets a GPU per rank as if each rank were on a host of its own, or with `as_launched` what
    torchrun gives it, which needs a GPU per rank."""

    def run(*words: str, script: Path | None = None, as_launched: bool = False, **variables: str) -> Job:
        logs = tmp_path / "logs"
        logs.mkdir(exist_ok=True)
        for stale in logs.glob("*"):
            stale.unlink()
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_OWN)}
        environment.update(tcp_environment(logs))
        environment.update(variables)
        # The job's own store after it started over takes the port above this one.
        port = free_port(2)
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
        command += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
        if script is None:
            command += [str(Path(__file__).with_name("nccl_job.py")), *words]
        elif as_launched:
            command += [str(script), *words]
        else:
            command += ["--no-python", "bash", "-c", _OWN_HOST, "bash", sys.executable, str(script), *words]
        done = subprocess.run(
            command,
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            stdin=subprocess.DEVNULL,
        )
        result = next((json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')), {})
        files = sorted(logs.glob("*.log"))
        proofs = [proof for path in files if (proof := read_proof_file(path)).network is not None]
        text = "\n".join(path.read_text(errors="replace") for path in files)
        return Job(done.returncode, done.stdout + done.stderr, result.get("right"), result.get("nccl"), proofs, text)

    return run


def tcp_environment(logs: Path) -> Mapping[str, str]:
    return {
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_SOCKET_IFNAME": "lo",
        # A program that uses NVLink multicast can harm other users of the host's GPUs.
        "NCCL_NVLS_ENABLE": os.environ.get("NCCL_NVLS_ENABLE", "0"),
        "NCCL_IB_DISABLE": "1",
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV",
        "NCCL_DEBUG_FILE": str(logs / "nccl.%p.log"),
        "OMP_NUM_THREADS": "1",
    }
