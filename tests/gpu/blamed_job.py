"""A job of two ranks, started by torchrun, that never imports bagua. Rank 1 is late for a collective, and then is
stopped; rank 0 asks `bagua-net blame` about it until both were seen, also in its own log, lets it continue, and prints
one JSON line."""

from __future__ import annotations

import datetime
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

ELEMENTS = 1 << 18
PATIENCE_S = 40
SEEN = Path("seen-idle")  # by rank 0; a new folder is the working directory of both


class Logged(logging.Handler):
    """What Bagua-Net logs in this process."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def has(self, part: str) -> bool:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            if any(part in line for line in self.lines):
                return True
            time.sleep(0.05)
        return False


def blamed(pid: int, kind: str, nccl: list[str], after_s: int = 1) -> bool:
    """Whether the process was blamed for this within PATIENCE_S, by one that waited for so long. `nccl` gets what
    NCCL says then."""
    words = [sys.executable, "-m", "bagua.cli.net", "blame", "--after", str(after_s), "--json"]
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        shown = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, stdin=subprocess.DEVNULL)
        if shown.returncode not in (0, 1):
            raise SystemExit(shown.stderr)
        found = json.loads(shown.stdout)
        if any((one["party"]["pid"], one["kind"]) == (pid, kind) for one in found["culprits"]):
            nccl.extend(found["nccl"])
            return True
    return False


def watch(pid: int, logged: Logged, nccl: list[str]) -> list[str]:
    """What rank 1 was blamed for, by the command and in this rank's log. It continues however this ends."""
    try:
        kinds = ["idle"] * blamed(pid, "idle", nccl) + ["logged idle"] * logged.has(
            "It runs, and waits for no other process"
        )
        SEEN.touch()
        # Long enough for the line in the log, which comes within three seconds.
        kinds += ["stopped"] * blamed(pid, "stopped", nccl, after_s=4)
        return kinds + ["logged stopped"] * logged.has("is stopped, by SIGSTOP")
    finally:
        SEEN.touch()
        os.kill(pid, signal.SIGCONT)


def dawdle() -> None:
    deadline = time.monotonic() + 2 * PATIENCE_S
    while not SEEN.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGSTOP)


def main() -> None:
    signal.alarm(140)  # the test's last resort: torchrun puts its workers out of reach of whoever kills it
    rank = int(os.environ["RANK"])
    # Of the processes on a host, the first has the port of the RAS service: the one that is stopped must not be it.
    host, port = os.environ["NCCL_RAS_ADDR"].split(":")
    os.environ["NCCL_RAS_ADDR"] = f"{host}:{int(port) + rank}"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=120), device_id=device)
    pids = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2)]
    dist.all_gather(pids, torch.tensor([os.getpid()], device=device))
    other = int(pids[1].item())
    values = torch.full((ELEMENTS,), float(rank + 1), device=device)
    dist.all_reduce(values)  # opens all connections
    torch.cuda.synchronize()
    kinds: list[str] = []
    said: list[str] = []  # by NCCL
    logged = Logged()
    logging.getLogger("bagua.net").addHandler(logged)
    if rank == 1:
        dawdle()
        dist.all_reduce(values)
    else:
        dist.all_reduce(values)  # in the background
        kinds = watch(other, logged, said)
    torch.cuda.synchronize()
    right = bool((values == 6.0).all().item())
    if rank == 0:
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        result = {"right": right, "nccl": nccl, "kinds": kinds, "pid": other, "logged": logged.lines, "said": said}
        print(json.dumps(result), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
