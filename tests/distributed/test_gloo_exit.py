"""At the end of a process Bagua's threads end before the pause that is left to gloo's, whatever was imported first."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from support.ports import free_port

# (what is imported first, how long what is under way is waited for). With 0 it takes longer, as on a slow network.
CASES = [
    ("bagua.job.job_thread", 5),
    ("bagua.comm_ops.averaging_loop bagua.engine.comm_thread", 5),
    ("bagua", 0),
]

# A process for each case, forked from one that has imported torch.
PROGRAM = """
import importlib, json, os, sys, threading, weakref

weakref.finalize(threading.current_thread(), print)  # as some library does: now finalizers run after all of atexit's

import torch
import torch.distributed as dist

for first, quiet_s, port in json.loads(sys.argv[1]):
    child = os.fork()
    if child == 0:
        break
    print(f"{first} ended with {os.waitpid(child, 0)[1]}", flush=True)
else:
    os._exit(0)

os.environ["MASTER_PORT"] = str(port)
for name in first.split():
    importlib.import_module(name)

from bagua.job import gloo_exit
from bagua.collectives.process_group import from_torch_group
from bagua.job.job_thread import current_job_thread
from bagua.engine import comm_thread
from bagua.engine.comm_thread import join_thread

comm_thread._JOIN_SECONDS = quiet_s

def sleep(_):
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("bagua-")]
    print(f"{first} pauses with {names}, job {future.done()}", flush=True)

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


def test_threads_end_before_the_pause() -> None:
    environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([(*case, free_port()) for case in CASES])],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("waits for its last communication") == 1, "of the case that does not wait"
    for first, _ in CASES:
        assert f"{first} pauses with [], job True" in done.stdout.splitlines(), done.stdout + done.stderr
        assert f"{first} ended with 0" in done.stdout.splitlines(), done.stdout + done.stderr
