"""One rank: `python -m core_comparison.worker`. All contenders take their turns in this process, in one process group.

Speaks the driver's protocol (see bagua.net.bench.endpoint): a JSON object a line, from the parent and to it.

    <- {"event": "store", "port": 40123}                rank 0 only: the port of the group's TCPStore
    -> {"op": "join", "host": "127.0.0.1", "port": 40123}
    <- {"event": "ready", "torch": "2.13.0", "nccl": null, "device": "cpu", "unavailable": {"async": "..."}}
    -> {"op": "settle", "model": "mlp", "contender": "torch-ddp", "length": 32, "batch_size": 32, "dtype": "float32",
        "steps": 5, "warmup": 5}
    <- {"event": "settle"}                              trained, and forgotten
    -> {"op": "turn", ..., "steps": 20, "warmup": 5}
    <- {"event": "turn", "step_seconds": [...], "fingerprint": [...], "difference": null, ...}
    -> {"op": "trace", ..., "path": "out/mlp.torch-ddp.json.gz"}
    <- {"event": "trace", "communication": {...}}       null on all ranks but 0
    -> {"op": "quit"}
    <- {"event": "bye"}
    <- {"event": "error", "message": "..."}             instead of any reply; the process then exits with 1
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import os
import signal
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist

from core_comparison.agreement import Reference, parameters_on_host
from core_comparison.catalogue import REFERENCE
from core_comparison.contenders import prepare
from core_comparison.models import ModelSize, build, example
from core_comparison.profiling import trace_steps
from core_comparison.turn import Turn

_PR_SET_PDEATHSIG = 1


class Worker:
    """Runs one command at a time, in the main thread."""

    def __init__(self, arguments: argparse.Namespace, commands: IO[str], replies: IO[str]) -> None:
        self._arguments = arguments
        self._commands = commands
        self._replies = replies
        is_cuda = arguments.device == "cuda"
        self._local_rank = 0 if arguments.alone_on_node else arguments.rank
        self._device = torch.device("cuda", self._local_rank) if is_cuda else torch.device("cpu")
        self._references: dict[str, Reference] = {}  # by model; rank 0 only

    def serve(self) -> int:
        try:
            self._join()
            for line in self._commands:
                command = json.loads(line) if line.startswith("{") else {"op": line.strip()}
                if command["op"] == "quit":
                    dist.destroy_process_group()
                    self._reply("bye")
                    return 0
                self._execute(command)
        except Exception as error:  # the boundary of the process: the parent has to be told, whatever it was
            traceback.print_exc()
            self._reply("error", message=f"{type(error).__name__}: {error}")
            return 1
        return 0

    def _reply(self, event: str, **fields: object) -> None:
        self._replies.write(json.dumps({"event": event, **fields}) + "\n")
        self._replies.flush()

    def _join(self) -> None:
        arguments = self._arguments
        timeout = datetime.timedelta(seconds=arguments.timeout_s)
        store = None
        if arguments.rank == 0:
            # Port 0 lets the kernel choose: no other program can take the port in between.
            store = dist.TCPStore("127.0.0.1", 0, arguments.ranks, True, timeout=timeout, wait_for_workers=False)
            self._reply("store", port=store.port)
        line = self._commands.readline()
        if not line.startswith("{"):
            raise RuntimeError("the parent ended the run before the group was formed")
        join = json.loads(line)
        if store is None:
            store = dist.TCPStore(join["host"], join["port"], arguments.ranks, False, timeout=timeout)
        # What a launcher sets and Bagua reads.
        alone = arguments.alone_on_node
        os.environ.update(MASTER_ADDR=str(join["host"]), MASTER_PORT=str(join["port"]))
        os.environ.update(RANK=str(arguments.rank), WORLD_SIZE=str(arguments.ranks))
        os.environ.update(LOCAL_RANK=str(self._local_rank), LOCAL_WORLD_SIZE=str(1 if alone else arguments.ranks))
        os.environ.update(GROUP_RANK=str(arguments.rank if alone else 0))
        is_cuda = self._device.type == "cuda"
        if is_cuda:
            torch.cuda.set_device(self._device)
        # Ranks share the host's cores; each with a pool for all of them would only get in each other's way.
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // arguments.ranks))
        torch.use_deterministic_algorithms(arguments.deterministic, warn_only=True)
        # Two turns may not differ in what the search for the fastest kernel happened to find.
        torch.backends.cudnn.benchmark = False
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if is_cuda else "gloo",
            store=store,
            rank=arguments.rank,
            world_size=arguments.ranks,
            timeout=timeout,
        )
        # Opens the connections, which is done by the first collective.
        dist.all_reduce(torch.zeros(1, device=self._device))
        unavailable = prepare(arguments.contenders.split(","))
        self._reply(
            "ready",
            torch=torch.__version__,
            nccl=".".join(map(str, torch.cuda.nccl.version())) if is_cuda else None,
            device=torch.cuda.get_device_name(self._device) if is_cuda else "cpu",
            threads=torch.get_num_threads(),
            unavailable=unavailable,
        )

    def _execute(self, command: dict[str, Any]) -> None:
        if command["op"] == "settle":
            with Turn(command["contender"], self._device) as turn:
                self._wrap(turn, command)
                turn.train(command["steps"])
            self._reply("settle")
        elif command["op"] == "turn":
            self._turn(command)
        elif command["op"] == "trace":
            self._trace(command)
        else:
            raise ValueError(f"unknown operation {command['op']!r}")

    def _wrap(self, turn: Turn, command: dict[str, Any]) -> None:
        arguments = self._arguments
        size = ModelSize(command["length"], command["batch_size"], command["dtype"])
        workload = build(command["model"], size, self._device, seed=arguments.seed, rank=arguments.rank)
        turn.wrap(workload, warmup=command["warmup"])

    def _turn(self, command: dict[str, Any]) -> None:
        model, contender = command["model"], command["contender"]
        keeps = self._arguments.rank == 0 and contender == REFERENCE and model not in self._references
        difference = None
        with Turn(contender, self._device) as turn:
            self._wrap(turn, command)
            start = parameters_on_host(turn.model) if keeps else []
            measured = turn.measure(command["steps"], command["warmup"])
            turn.finish()
            fingerprint = example().fingerprint(turn.model, self._device).tolist()
            if keeps:
                self._references[model] = Reference(start, parameters_on_host(turn.model))
            elif model in self._references:
                difference = asdict(self._references[model].compare(turn.model))
        self._reply("turn", **asdict(measured), fingerprint=fingerprint, difference=difference, kept=turn.kept())

    def _trace(self, command: dict[str, Any]) -> None:
        path = Path(command["path"]) if self._arguments.rank == 0 else None
        with Turn(command["contender"], self._device) as turn:
            self._wrap(turn, command)
            summary = trace_steps(turn, self._device, steps=command["steps"], warmup=command["warmup"], path=path)
        communication = None if summary is None else {**asdict(summary), "hidden_share": summary.hidden_share}
        self._reply("trace", communication=communication)


def _die_with_parent(parent_pid: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The parent may have died before the call above.
    if os.getppid() != parent_pid:
        os._exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m core_comparison.worker")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--contenders", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--alone-on-node", action="store_true")
    parser.add_argument("--timeout-s", type=float, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    arguments = parser.parse_args()
    _die_with_parent(arguments.parent_pid)
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # Whatever a library prints must not be taken for a reply.
    os.dup2(2, 1)
    code = Worker(arguments, sys.stdin, replies).serve()
    replies.flush()
    sys.stderr.flush()
    # Not sys.exit: after an error the other ranks are gone, and NCCL's destructors would wait for them; and gloo's can
    # wait for a thread that waits for Python's lock.
    os._exit(code)


if __name__ == "__main__":
    main()
