"""One rank of one backend: `python -m bagua.net.bench.nccl_ab.worker`. Lives for the whole run, because NCCL reads
its environment once per process; runs one command at a time and sleeps in between.

One JSON object per line on stdin and one reply per line on the first stdout (see bagua.net.bench.endpoint). Anything
that torch or NCCL print goes to stderr. End of input ends the process; it never outlives its parent.

    <- {"event": "store", "port": 40123}            rank 0 only: the port of the group's TCPStore
    -> {"op": "join", "host": "127.0.0.1", "port": 40123}
    <- {"event": "ready", "torch": "2.11.0", "nccl": "2.28.9", "device": "NVIDIA H200", "pid": 4711}
    -> {"op": "verify", "collective": "all_reduce", "bytes": 1024, "salt": 1}
    <- {"event": "verified", "wrong_elements": 0, "first_wrong": null}
    -> {"op": "time", "collective": "all_reduce", "bytes": 1024, "iterations": 100, "warmup": 10, "single": 50}
    <- {"event": "timed", "seconds": 0.0021, "single_seconds": [...], "cpu_seconds": 0.003}
    -> {"op": "memory"}
    <- {"event": "memory", "free_bytes": 149430468608}    what this rank could allocate now
    -> {"op": "proof"}
    <- {"event": "proof", "network": "BaguaNet", "table": "v11", ...}       read from this process's NCCL log
    -> {"op": "quit"}
    <- {"event": "bye"}
    <- {"event": "error", "message": "..."}         instead of any reply; the process then exits with 1
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import importlib
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from bagua.net.bench.nccl_ab.log import read_proof_file

if TYPE_CHECKING:
    from bagua.net.bench.nccl_ab.gpu_collectives import CollectiveRunner

_PR_SET_PDEATHSIG = 1


def _die_with_parent(parent_pid: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The parent may have died before the call above.
    if os.getppid() != parent_pid:
        os._exit(1)


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class Worker:
    def __init__(self, arguments: argparse.Namespace, commands: IO[str], replies: IO[str]) -> None:
        self._arguments = arguments
        self._commands = commands
        self._replies = replies
        self._cuda = arguments.device == "cuda"
        # Imported in _join: the reply to a missing or broken torch is an error event like any other.
        self._torch: Any = None
        self._distributed: Any = None
        self._runner: CollectiveRunner

    def serve(self) -> int:
        try:
            self._join()
            for line in self._commands:
                if line.strip() == "quit":  # how an endpoint is closed that was not asked to leave in order
                    return 0
                command = json.loads(line)
                if command["op"] == "quit":
                    self._leave()
                    return 0
                self._reply(self._execute(command))
        except Exception as error:  # the boundary of the process: the parent has to be told, whatever it was
            message = f"{type(error).__name__}: {error}"
            if "out of memory" in message.lower():
                message += "; lower -e/--maxbytes, or the number of backends, each of which is a process on every GPU"
            self._reply({"event": "error", "message": message})
            return 1
        return 0

    def _reply(self, message: dict[str, Any]) -> None:
        self._replies.write(json.dumps(message) + "\n")
        self._replies.flush()

    def _join(self) -> None:
        self._torch = torch = importlib.import_module("torch")
        self._distributed = dist = importlib.import_module("torch.distributed")
        from bagua.net.bench.nccl_ab.gpu_collectives import CollectiveRunner

        arguments = self._arguments
        timeout = datetime.timedelta(seconds=arguments.timeout_s)
        torch.set_num_threads(1)
        store = None
        if arguments.rank == 0:
            # Port 0 lets the kernel choose: no other program can take the port in between.
            store = dist.TCPStore(arguments.bind, 0, arguments.ranks, True, timeout=timeout, wait_for_workers=False)
            self._reply({"event": "store", "port": store.port})
        line = self._commands.readline()
        if not line or line.strip() == "quit":
            raise RuntimeError("the parent ended the run before the group was formed")
        join = json.loads(line)
        if store is None:
            store = dist.TCPStore(join["host"], join["port"], arguments.ranks, False, timeout=timeout)
        options: dict[str, Any] = {}
        device = torch.device("cpu")
        if self._cuda:
            # A launcher may show each process its own GPU only.
            device = torch.device("cuda", arguments.local_rank % torch.cuda.device_count())
            torch.cuda.set_device(device)
            # With a device the communicator is made here, and not at the first collective.
            options["device_id"] = device
        dist.init_process_group(
            arguments.backend,
            store=store,
            rank=arguments.rank,
            world_size=arguments.ranks,
            timeout=timeout,
            **options,
        )
        dtype = getattr(torch, arguments.dtype)
        self._runner = CollectiveRunner(arguments.rank, arguments.ranks, device, dtype)
        self._synchronize()
        nccl = ".".join(str(part) for part in torch.cuda.nccl.version()) if arguments.backend == "nccl" else None
        name = torch.cuda.get_device_name(device) if self._cuda else "cpu"
        self._reply({"event": "ready", "torch": torch.__version__, "nccl": nccl, "device": name, "pid": os.getpid()})

    def _synchronize(self) -> None:
        if not self._cuda:
            return
        # A blocking event sleeps; torch.cuda.synchronize() spins, which would be counted as the network's CPU time.
        event = self._torch.cuda.Event(blocking=True)
        event.record()
        event.synchronize()

    def _execute(self, command: dict[str, Any]) -> dict[str, Any]:
        operation = command["op"]
        if operation == "memory":
            return {"event": "memory", "free_bytes": self._runner.free_bytes()}
        if operation == "verify":
            collective, size_bytes = command["collective"], command["bytes"]
            with self._runner.holding(collective, size_bytes):
                outcome = self._runner.verify(collective, size_bytes, command["salt"])
                self._synchronize()
            return {
                "event": "verified",
                "wrong_elements": outcome.wrong_elements,
                "first_wrong": outcome.first_wrong,
            }
        if operation == "time":
            with self._runner.holding(command["collective"], command["bytes"]):
                return self._time(command)
        if operation == "proof":
            log = Path(os.environ["NCCL_DEBUG_FILE"])
            return {"event": "proof", **read_proof_file(log).as_dict()}
        raise ValueError(f"unknown operation {operation!r}")

    def _time(self, command: dict[str, Any]) -> dict[str, Any]:
        launch = self._runner.launch(command["collective"], command["bytes"])
        for _ in range(command["warmup"]):
            launch()
        self._synchronize()
        cpu_before = _cpu_seconds()
        seconds = self._time_batch(launch, command["iterations"])
        cpu_seconds = _cpu_seconds() - cpu_before
        single_seconds = []
        for _ in range(command["single"]):
            began = time.perf_counter()
            launch()
            self._synchronize_fast()
            single_seconds.append(time.perf_counter() - began)
        return {
            "event": "timed",
            "seconds": seconds,
            "single_seconds": single_seconds,
            "cpu_seconds": cpu_seconds,
        }

    def _time_batch(self, launch: Any, iterations: int) -> float:
        """Seconds of all iterations: on a GPU between two events on the stream, as nccl-tests measures."""
        if not self._cuda:
            began = time.perf_counter()
            for _ in range(iterations):
                launch()
            return time.perf_counter() - began
        event = self._torch.cuda.Event
        start, end = event(enable_timing=True), event(enable_timing=True, blocking=True)
        start.record()
        for _ in range(iterations):
            launch()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def _synchronize_fast(self) -> None:
        """Spinning: the wake-up of a blocking event would be part of every single latency."""
        if self._cuda:
            self._torch.cuda.synchronize()

    def _leave(self) -> None:
        self._distributed.destroy_process_group()
        self._reply({"event": "bye"})


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bagua.net.bench.nccl_ab.worker", description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--local-rank", type=int, required=True)
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--bind", default="127.0.0.1", help="address of the group's TCPStore (rank 0)")
    parser.add_argument("--timeout-s", type=float, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    return parser


def main() -> int:
    arguments = make_parser().parse_args()
    _die_with_parent(arguments.parent_pid)
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # Whatever a library prints must not be taken for a reply.
    os.dup2(2, 1)
    code = Worker(arguments, sys.stdin, replies).serve()
    replies.flush()
    sys.stderr.flush()
    # Not sys.exit: after an error the other ranks are gone, and NCCL's destructors would wait for them.
    os._exit(code)


if __name__ == "__main__":
    main()
