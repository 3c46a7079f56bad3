# ranks: 1
"""torch.profiler's file is one that `bagua-net trace merge` reads, with times on the wall clock."""

import os
import tempfile
import time
from pathlib import Path

import torch
from support.page_programs import run_blocks

from bagua.cli.net import main
from bagua.net.trace import TraceFile

rank = 0


def train_steps() -> None:
    torch.ones(100).add(1)


with tempfile.TemporaryDirectory() as folder:
    os.chdir(folder)
    began_s = time.time()
    run_blocks("docs/how-to/trace.md", 1)
    first_us, last_us = TraceFile.read(Path("torch.0.json")).span_us()
    assert began_s - 1 < first_us / 1e6 <= last_us / 1e6 < time.time() + 1
    assert main(["trace", "merge", "torch.0.json", "-o", "both.json"]) == 0
    os.chdir("/")
