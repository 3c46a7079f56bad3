"""At the end of a process Bagua's threads end before the pause that is left to gloo's, whatever was imported first."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support.ports import free_port

PROGRAM = """
import sys, threading, time, weakref
import importlib

weakref.finalize(threading.current_thread(), print)  # as some library does: now finalizers run after all of atexit's
for name in sys.argv[1].split():
    importlib.import_module(name)

import torch
import torch.distributed as dist
from bagua.job import gloo_exit
from bagua.collectives.process_group import from_torch_group
from bagua.job.job_thread import current_job_thread
from bagua.engine import comm_thread
from bagua.engine.comm_thread import join_thread

comm_thread._JOIN_SECONDS = float(sys.argv[2])

def sleep(_):
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("bagua-")]
    print(f"pause with {names}, job {future.done()}", flush=True)

class Time:
    sleep = staticmethod(sleep)

dist.init_process_group("gloo")
current_job_thread()
thread = join_thread(from_torch_group(dist.group.WORLD))
leave = weakref.finalize(thread, thread.leave)
may_end = threading.Event()
future = thread.submit(may_end.wait)
gloo_exit.time = Time
timer = threading.Timer(0.1, may_end.set)
timer.daemon = True  # Python waits for others before it calls what is registered
timer.start()
"""


@pytest.mark.parametrize(
    ("first", "quiet_s"),
    [
        ("bagua.job.job_thread", "5"),
        ("bagua.comm_ops.averaging_exit bagua.engine.comm_thread", "5"),
        ("bagua", "0"),  # what is under way takes longer, as on a slow network
    ],
)
def test_threads_end_before_the_pause(first: str, quiet_s: str) -> None:
    environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, first, quiet_s],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert ("waits for its last communication" in done.stderr) == (quiet_s == "0")
    assert "pause with [], job True" in done.stdout.splitlines(), done.stdout + done.stderr
